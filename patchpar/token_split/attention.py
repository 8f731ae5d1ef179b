"""One attention call in a block whose tokens are split: own queries against everybody's keys, of this step or the last.

Where queries and keys are the same tokens, as nearly always, or the queries are our tokens alone, any exact mode of
`sequence` does it. Other calls (what everybody has asks the tokens, or a mask that is no longer whole) gather the keys
first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar import stale_attention
from patchpar.context import KeysValues
from patchpar.errors import UnsupportedModel
from patchpar.exchange import Door, Gather
from patchpar.mesh import Axis
from patchpar.patches import Bands
from patchpar.sequence.call import Shared, as_bias
from patchpar.share import Share
from patchpar.stale_attention import attend_with_past
from patchpar.token_split.kernel import Kernel
from patchpar.token_split.plan import AttentionCall, Rows
from patchpar.tokens import Grid

Mode = Callable[[Door, Axis, str, Shared], Tensor]


@dataclass(frozen=True, slots=True)
class Split:
    """How tokens are split between the places of an axis, and how their keys meet (None: never, wrong on purpose).

    `share`: what is remembered of the last step, where keys of the last step are attended to. `kernel`: the user's own,
    called on own queries and everybody's keys at once.
    """

    door: Door
    axis: Axis
    mode: Mode | None
    share: Share | None = None
    kernel: Kernel | None = None

    def sizes(self, tokens: int) -> tuple[int, ...]:
        """How many tokens each place has."""
        each, more = divmod(tokens, self.axis.size)
        return tuple(each + (place < more) for place in range(self.axis.size))

    def grid(self, tokens: int) -> Grid:
        """The tokens of all places as rows of one token each."""
        return Grid(Bands(tuple(accumulate(self.sizes(tokens), initial=0))), across=1, dim=-2)

    def own(self, tokens: int) -> tuple[int, int]:
        """(first, count) of our tokens."""
        sizes = self.sizes(tokens)
        return sum(sizes[: self.axis.rank]), sizes[self.axis.rank]

    def gather(self, x: Tensor, dim: int, start: int, tokens: int, where: str) -> Tensor:
        """`x` with everybody's tokens, of which ours start at `start`; whatever is around them stays."""
        count = self.own(tokens)[1]
        own = x.narrow(dim, start, count).contiguous()
        parts = Gather(self.door, self.axis, "tokens", where).shares(own, dim, self.sizes(tokens))
        before, after = x.narrow(dim, 0, start), x.narrow(dim, start + count, x.shape[dim] - start - count)
        return torch.cat([before, *parts, after], dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def answer(
        self, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool = False, kernel: Kernel | None = None
    ) -> Tensor:
        """Attention of these queries to other keys."""
        attend: Any = kernel if kernel is not None and self.query.ndim == 4 else F.scaled_dot_product_attention
        found: Tensor = attend(
            self.query, key, value, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=self.enable_gqa
        )
        return found


def attend_split(split: Split, where: str, call: AttentionCall, tokens: int, asked: Asked) -> Tensor:
    """What the call gives for our queries, `tokens` being split. Raises UnsupportedModel, ExchangeError."""
    if asked.dropout_p:
        raise UnsupportedModel(f"{where}: attention with dropout cannot be split: put the model in eval mode")
    if call.mask_dims == 4 and asked.attn_mask is not None and asked.attn_mask.ndim == 2:
        # diffusers' dispatcher makes a mask of keys out of [batch, keys], but only where all keys are there
        asked = replace(asked, attn_mask=asked.attn_mask[:, None, None])
    first, count = split.own(tokens)
    queries = _Line.of(call.queries, asked.query, tokens, count)
    if call.keys is None:
        mask = None if asked.attn_mask is None else queries.cut(asked.attn_mask, -2, first)
        return asked.answer(asked.key, asked.value, mask, causal=asked.is_causal, kernel=split.kernel)
    keys = _Line.of(call.keys, asked.key, tokens, count)
    mask = _whole_mask(split, where, asked, queries, keys)
    if split.mode is None or split.axis.size == 1:
        cut = None if mask is None else keys.cut(queries.cut(mask, -2, first), -1, first)
        return asked.answer(asked.key, asked.value, cut)
    slot = None if split.share is None else split.share.slot(where, split.share.treatment.context)
    if split.share is not None and slot is not None:
        rows = None if mask is None else queries.cut(mask, -2, first)
        past = _with_past(where, asked, (queries, keys), rows, split.kernel)
        out = queries.in_order(attend_with_past(split.share, where, split.grid(tokens), past, slot), 2)
        return out.squeeze(1) if asked.query.ndim == 3 else out
    if split.kernel is None and _fits_a_mode(asked, queries, keys, mask):
        return _by_mode(split, where, asked, (queries, keys), mask)
    key, value = (split.gather(x, -2, keys.start, tokens, where) for x in (asked.key, asked.value))
    return asked.answer(key, value, None if mask is None else queries.cut(mask, -2, first), kernel=split.kernel)


@dataclass(frozen=True, slots=True)
class _Line:
    """Queries or keys of a call: `own` of them are our tokens, from `start` on; with everybody's there are `whole`."""

    start: int
    own: int
    tokens: int
    local: int

    @classmethod
    def of(cls, rows: Rows | None, x: Tensor, tokens: int, own: int) -> "_Line":
        size = x.shape[-2]
        return cls(size, 0, 0, size) if rows is None else cls(rows.start(size, own), own, tokens, size)

    @property
    def whole(self) -> int:
        return self.local - self.own + self.tokens

    @property
    def after(self) -> int:
        return self.local - self.own - self.start

    def cut(self, mask: Tensor, dim: int, first: int) -> Tensor:
        """A mask that is whole along `dim`, as it is for ours."""
        if mask.ndim < -dim or mask.shape[dim] in (1, self.local) or self.own == self.tokens:
            return mask
        sizes = (self.start, first, self.own, self.tokens - first - self.own, self.after)
        before, _, own, _, after = mask.split_with_sizes(sizes, dim)
        return torch.cat([before, own, after], dim)

    def common_first(self, x: Tensor, dim: int, run: int) -> Tensor:
        """What everybody has first, then the `run` of tokens."""
        before, own, after = x.split_with_sizes([self.start, run, x.shape[dim] - self.start - run], dim)
        return torch.cat([before, after, own], dim) if self.after else x

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """The other way round."""
        before, after, own = x.split_with_sizes([self.start, self.after, self.own], dim)
        return torch.cat([before, own, after], dim) if self.after else x


def _whole_mask(split: Split, where: str, asked: Asked, queries: _Line, keys: _Line) -> Tensor | None:
    """The mask with a column for every key of the whole, in their order; causality as a mask."""
    mask = asked.attn_mask
    if asked.is_causal:
        size = (queries.whole, keys.whole)
        return torch.ones(size, dtype=torch.bool, device=asked.query.device).tril()
    if mask is None or mask.shape[-1] in (1, keys.whole):
        return mask
    if mask.shape[-1] == keys.whole + keys.local:  # diffusers pads a mask of more columns than keys by their number
        return mask[..., : keys.whole]
    if mask.shape[-1] != keys.local:
        raise UnsupportedModel(
            f"{where}: a mask of {mask.shape[-1]} columns is neither for the {keys.local} keys that are here nor for "
            f"all {keys.whole}"
        )
    if mask.ndim < 2 or mask.shape[-2] == 1:
        return split.gather(mask, -1, keys.start, keys.tokens, where)
    return _outer_product(split, where, mask, queries, keys)


def _outer_product(split: Split, where: str, mask: Tensor, queries: _Line, keys: _Line) -> Tensor:
    """A mask made in the block from what is here, of tokens that count and tokens that do not."""
    if mask.dtype != torch.bool:
        raise UnsupportedModel(
            f"{where}: a {mask.dtype} mask is made from the tokens that are here: it cannot be split"
        )
    rows, columns = mask.any(-1, keepdim=True), mask.any(-2, keepdim=True)
    if not torch.equal(rows & columns, mask):
        raise UnsupportedModel(f"{where}: a mask is made from the tokens that are here, and differs by query and key")
    columns = split.gather(columns, -1, keys.start, keys.tokens, where)
    return rows & columns


def _fits_a_mode(asked: Asked, queries: _Line, keys: _Line, mask: Tensor | None) -> bool:
    rows_whole = mask is None or mask.ndim < 2 or mask.shape[-2] in (1, queries.whole)
    shaped = asked.query.ndim in (3, 4) and asked.value.shape[-1] == asked.key.shape[-1]
    own_alone = queries.own == queries.local == keys.own
    return (queries == keys or own_alone) and rows_whole and shaped


def _with_past(
    where: str, asked: Asked, lines: tuple[_Line, _Line], mask: Tensor | None, kernel: Kernel | None
) -> stale_attention.Asked:
    """The call as `stale_attention` wants it, of queries and keys: what everybody has, then our tokens."""
    if asked.value.shape[-1] != asked.key.shape[-1]:
        raise UnsupportedModel(f"{where}: values of another width than keys need strategy 'exact'")
    flat = asked.query.ndim == 3
    queries, keys = lines
    query, key, value = (x.unsqueeze(1) if flat else x for x in (asked.query, asked.key, asked.value))
    if mask is not None:
        mask = keys.common_first(mask, -1, keys.tokens) if mask.shape[-1] > 1 else mask
        mask = queries.common_first(mask, -2, queries.own) if mask.ndim > 1 and mask.shape[-2] > 1 else mask
        mask = mask.unsqueeze(1) if flat and mask.ndim == 3 else mask
        mask = as_bias(mask[(None,) * (4 - mask.ndim)], query.dtype)
    k_BlND, v_BlND = (keys.common_first(x, 2, keys.own).transpose(1, 2) for x in (key, value))
    query = queries.common_first(query, 2, queries.own)
    here = KeysValues(k_BlND, v_BlND)
    return stale_attention.Asked(query, here, asked.scale, keys.local - keys.own, mask, kernel)


def _by_mode(split: Split, where: str, asked: Asked, lines: tuple[_Line, _Line], mask: Tensor | None) -> Tensor:
    assert split.mode is not None
    flat = asked.query.ndim == 3
    queries, keys = lines
    tensors = (x.unsqueeze(1) if flat else x for x in (asked.query, asked.key, asked.value))
    query, key, value = (
        line.common_first(x, 2, line.own) for x, line in zip(tensors, (queries, keys, keys), strict=True)
    )
    if mask is not None:
        mask = mask.unsqueeze(1) if flat and mask.ndim == 3 else mask
        for dim, line in ((-1, keys), (-2, queries)):
            if mask.ndim >= -dim and mask.shape[dim] > 1:
                mask = line.common_first(mask, dim, line.tokens)
    shared = Shared(
        q_BNlD=query,
        k_BMlD=key,
        v_BMlD=value,
        sizes=split.sizes(keys.tokens),
        place=split.axis.rank,
        common=keys.local - keys.own,
        common_asks=queries == keys,
        mask=mask,
        scale=asked.scale,
    )
    out = queries.in_order(split.mode(split.door, split.axis, where, shared), 2)
    return out.squeeze(1) if flat else out
