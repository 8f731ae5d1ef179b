"""One attention call over tokens split between ranks, the input of every exact mode.

The whole sequence is, in this order: tokens that all ranks hold (text, in joint attention), then each rank's own.
Masks stay whole; a mode takes the rows and columns it needs.

Shape letters: B batch, N query heads, M key heads (N / M queries share one), L tokens of the whole, l this rank's own,
c common ones, D head width.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.errors import UnsupportedModel
from patchpar.shard.attention.attention_memory import AttentionMemory, Made
from patchpar.shard.sdpa import TORCHS

T = TypeVar("T")


class TokenSpan(NamedTuple):
    """Tokens `start` to `stop` of the whole sequence."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class _Arguments(NamedTuple):
    """The fields of `ShardedQKV`: a tuple, since every attention of every step makes one."""

    q_BNlD: Tensor
    k_BMlD: Tensor
    v_BMlD: Tensor
    sizes: tuple[int, ...]
    group_rank: int
    common: int = 0
    common_asks: bool = True
    mask: Tensor | None = None
    scale: float | None = None
    kernel: Callable[..., Tensor] | None = None
    memory: AttentionMemory | None = None


class ShardedQKV(_Arguments):
    """Queries, keys and values of this rank: `common` tokens first, then its own.

    `sizes`: the number of own tokens of each rank. `common_asks`: whether the common tokens are queries too, not only
    keys. `mask`: additive or boolean, broadcastable to [B, N, queries of the whole, L]. `kernel`: the user's own in the
    place of scaled_dot_product_attention, where all keys are attended to at once. `memory`: has the buffers of what is
    exchanged, if given. Raises UnsupportedModel.
    """

    __slots__ = ()

    def __new__(cls, **arguments: Any) -> "ShardedQKV":
        """Check the shapes."""
        self = super().__new__(cls, **arguments)
        queries, keys, values = self.q_BNlD.shape, self.k_BMlD.shape, self.v_BMlD.shape
        local = self.common + self.sizes[self.group_rank]
        asking = local if self.common_asks else local - self.common
        if queries[2] != asking or keys[2] != local or values[2] != local:
            shapes = [tuple(shape) for shape in (queries, keys, values)]
            raise UnsupportedModel(
                f"group rank {self.group_rank} has {self.common} common and {self.sizes[self.group_rank]} own tokens, "
                f"but queries, keys and values are {shapes}"
            )
        if keys != values:
            raise UnsupportedModel(f"keys are {tuple(keys)} and values {tuple(values)}: they are sent as one tensor")
        if queries[1] % keys[1]:
            raise UnsupportedModel(f"{queries[1]} query heads cannot share {keys[1]} key heads evenly")
        return self

    def attend_to(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output [B, n, q, D] of queries to keys and values [B, m, k, D], by the kernel of this call."""
        attend = TORCHS if self.kernel is None else self.kernel
        gqa = query.shape[1] != key.shape[1]
        return attend(
            query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=self.scale, enable_gqa=gqa
        )

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return self.common + sum(self.sizes)

    @property
    def asking(self) -> int:
        """Number of common tokens before this rank's own queries."""
        return self.common if self.common_asks else 0

    @property
    def beside(self) -> tuple[int, int, int]:
        """Number of leading common tokens among queries, keys and values."""
        return self.asking, self.common, self.common

    @property
    def own_rows(self) -> list[TokenSpan]:
        """Spans of this rank's queries in the whole sequence."""
        return [*([self.common_span] if self.asking else []), self.span(self.group_rank)]

    @property
    def common_span(self) -> TokenSpan:
        """Span of the common tokens in the whole sequence."""
        return TokenSpan(0, self.common)

    def span(self, group_rank: int) -> TokenSpan:
        """Return the span of a rank's own tokens in the whole sequence."""
        start = self.common + sum(self.sizes[:group_rank])
        return TokenSpan(start, start + self.sizes[group_rank])

    @property
    def own_keys(self) -> tuple[Tensor, Tensor]:
        """This rank's own keys and values, [B, M, l, D] each."""
        if not self.common:
            return self.k_BMlD, self.v_BMlD
        return self.k_BMlD[:, :, self.common :], self.v_BMlD[:, :, self.common :]

    def stacked_keys(self) -> Tensor:
        """Return this rank's own keys and values in one tensor [2, B, M, l, D], as they are sent."""
        return torch.stack(self.own_keys)

    def stacked_spec(self, group_rank: int) -> TensorSpec:
        """Return the spec of a rank's `stacked_keys`."""
        batch, heads, _, width = self.k_BMlD.shape
        return TensorSpec((2, batch, heads, self.sizes[group_rank], width), self.k_BMlD.dtype)

    def bias(self, rows: Sequence[TokenSpan], columns: Sequence[TokenSpan]) -> Tensor | None:
        """Return the logit bias of these queries and keys in the dtype of the queries; None where there is none.

        Broadcasts to [B, N, tokens of the rows, tokens of the columns].
        """
        if self.mask is None:
            return None
        return as_bias(_of(self._rows_of_mask(self.mask, rows), columns, -1), self.q_BNlD.dtype)

    @property
    def mask_of_own(self) -> Tensor | None:
        """The mask of this rank's queries, additive or boolean: [B, N, c + l, L], or broadcastable to it."""
        return None if self.mask is None else self._rows_of_mask(self.mask, self.own_rows)

    def _rows_of_mask(self, mask: Tensor, rows: Sequence[TokenSpan]) -> Tensor:
        silent = self.common - self.asking  # the mask has no rows for them
        return _of(mask, [TokenSpan(row.start - silent, row.stop - silent) for row in rows], -2)

    def buffers(self, key: Hashable, make: Callable[[], Made[T]]) -> T:
        """Return the buffers that `make` makes: those of the memory, if there is one, where `key` determines them."""
        return make()[0] if self.memory is None else self.memory.take(key, make)

    def with_heads(self, start: int, stop: int) -> "ShardedQKV":
        """Return a copy whose mask is that of the query heads `start` to `stop`."""
        mask = self.mask
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask.narrow(-3, start, stop - start)
        return self._replace(mask=mask)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of any shape as a logit bias: a boolean one as 0 and -inf in `dtype`, any other as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def spans_of(sizes: Sequence[int]) -> list[TokenSpan]:
    """Return consecutive spans of these lengths."""
    return [TokenSpan(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _of(x: Tensor, spans: Sequence[TokenSpan], dim: int) -> Tensor:
    """Return these spans of x along `dim`: a view where they follow each other."""
    if x.ndim < -dim or x.shape[dim] == 1:
        return x
    if all(before.stop == after.start for before, after in pairwise(spans)):
        return x.narrow(dim, spans[0].start, spans[-1].stop - spans[0].start)
    return torch.cat([x.narrow(dim, span.start, len(span)) for span in spans], dim)
