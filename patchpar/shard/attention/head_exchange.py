"""Tokens for heads and back: each rank gets all tokens of its group for some of the heads, and returns its outputs.

Messages are packed with tokens outermost, so that those of all ranks in one buffer are the tokens of the group, in
order; attention reads queries, keys and values out of it as they are.

Shape letters: as in `sharded_qkv`; n, m query and key heads of this rank, t tokens of the group, U its ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.layouts import AllToAllLayout, all_to_all_layout
from patchpar.comm.transport import FlatParts
from patchpar.errors import PlanError
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import pack_tokens, unpack_tokens
from patchpar.shard.attention.attention_memory import Made
from patchpar.shard.attention.lse_kernels import expand_heads
from patchpar.shard.attention.sharded_qkv import TokenSpan, spans_of

Qkv = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HeadAssignment:
    """Query heads that a rank of the group computes, and the key heads that they need."""

    query: TokenSpan
    key: TokenSpan
    group: int

    @property
    def heads(self) -> tuple[int, int, int]:
        """Number of heads of queries, keys and values that are sent."""
        return len(self.query), len(self.key), len(self.key)

    def of(self, qkv: Sequence[Tensor]) -> list[Tensor]:
        """Return views of these heads of queries [B, N, l, D] and of keys and values [B, M, l, D]."""
        spans = (self.query, self.key, self.key)
        return [x.narrow(1, span.start, len(span)) for x, span in zip(qkv, spans, strict=True)]

    @property
    def has_whole_groups(self) -> bool:
        """Whether the query heads are all that share the key heads."""
        return self.query == TokenSpan(self.key.start * self.group, self.key.stop * self.group)

    def keys_for(self, x_BMkD: Tensor) -> Tensor:
        """Return key heads [B, M, k, D], repeated for each of this rank's query heads where a group is cut."""
        if self.has_whole_groups:
            return x_BMkD
        first = self.query.start - self.key.start * self.group
        return expand_heads(x_BMkD, len(self.key) * self.group)[:, first : first + len(self.query)]


@lru_cache(maxsize=1024)  # every attention layer asks, in every call
def split_heads(heads: int, key_heads: int, group_ranks: int) -> tuple[HeadAssignment, ...]:
    """Return the heads of every rank, as even as possible; groups are cut only where too few. Raises PlanError."""
    if group_ranks > heads:
        raise PlanError(f"{heads} attention heads cannot be shared by {group_ranks} ranks: use ulysses={heads} or less")
    group = heads // key_heads
    unit = group if key_heads >= group_ranks else 1
    units = heads // unit
    sizes = [unit * (units // group_ranks + (group_rank < units % group_ranks)) for group_rank in range(group_ranks)]
    return tuple(
        HeadAssignment(span, TokenSpan(span.start // group, -(-span.stop // group)), group) for span in spans_of(sizes)
    )


class TokenBuffers(NamedTuple):
    """Where tokens go for heads: what is `sent`, and what is received, which are all tokens of the group.

    `by_rank`: what is sent as [U, l, ..., n + m + m, D], where one kernel writes it. `common`: where common tokens are
    among all, [c, B, n + m + m, D]. `qkv`: views of what is received, [B, n, a + t, D] of queries, of keys and values
    [B, m, c + t, D].
    """

    sent: FlatParts
    by_rank: Tensor
    received: FlatParts
    common: Tensor | None
    qkv: Qkv
    layout: AllToAllLayout


class OutputBuffers(NamedTuple):
    """Where heads go for tokens: what is received, and views of it by rank, [B, a + l, n, D] with the heads of each."""

    received: FlatParts
    by_rank: Sequence[Tensor]
    layout: AllToAllLayout


class HeadExchange:
    """The exchange between the ranks of a `group`, of which each has `sizes` own tokens, for tensors of these shapes.

    Queries are [batch, heads, ..., width], keys and values have `key_heads`. `common`: tokens that all ranks have, of
    which `asking` are queries. What follows from the shapes is computed once. Raises PlanError.
    """

    def __init__(
        self,
        group: Axis,
        sizes: tuple[int, ...],
        shape: tuple[int, int, int],
        key_heads: int,
        common: int = 0,
        asking: int = 0,
    ) -> None:
        (batch, heads, width), ranks, own = shape, group.size, sizes[group.rank]
        self.group, self.sizes, self.total = group, sizes, sum(sizes)
        self.split = split = split_heads(heads, key_heads, ranks)
        self.mine = mine = split[group.rank]
        self._common, self._asking, self._own, self._width = common, asking, own, width
        token = batch * sum(mine.heads) * width  # elements
        self._heads = mine.heads
        self._whole = (common + self.total, batch, sum(mine.heads), width)
        self._heads_sent = tuple(own * batch * sum(each.heads) * width for each in split)
        self._heads_received = tuple(token * size for size in sizes)
        asked, own_queries = asking + own, batch * len(mine.query) * width
        self._outputs_sent = tuple(own_queries * (asking + size) for size in sizes)
        self._outputs_received = tuple(asked * batch * len(each.query) * width for each in split)
        self._asked = asked
        self._is_single = batch == 1  # torch joins tensors of at most four dims by one kernel
        self._is_packed_at_once = len({each.heads for each in split}) == 1 and len(mine.key) * ranks == key_heads
        self._by_key_groups = mine.has_whole_groups

    def token_buffers(self, like: Tensor) -> Made[TokenBuffers]:
        """Return buffers for `to_heads`. `like`, of any shape, has the dtype and the device of the tokens."""
        common, asking, ranks = self._common, self._asking, self.group.size
        whole, flat = like.new_empty(self._whole), like.new_empty(sum(self._heads_sent))
        received = FlatParts(whole.narrow(0, common, self.total).view(-1), self._heads_received)
        of_token = (-1, self._width) if self._is_single else (self._whole[1], -1, self._width)
        by_rank = flat.view(ranks, self._own, *of_token) if self._is_packed_at_once else flat
        q_BnLD, k_BmLD, v_BmLD = unpack_tokens(whole, self._heads)
        if common != asking:
            q_BnLD = q_BnLD.narrow(2, common - asking, asking + self.total)
        layout = all_to_all_layout(self.group, self._heads_sent, self._heads_received, like.dtype)
        of_common = whole.narrow(0, 0, common) if common else None
        sent, qkv = FlatParts(flat, self._heads_sent), (q_BnLD, k_BmLD, v_BmLD)
        return TokenBuffers(sent, by_rank, received, of_common, qkv, layout), [flat, whole]

    def output_buffers(self, like: Tensor) -> Made[OutputBuffers]:
        """Return buffers for `to_tokens`; `like` as above."""
        received = FlatParts(like.new_empty(sum(self._outputs_received)), self._outputs_received)
        asked, width = self._asked, self._width
        by_rank = [
            part.view(asked, -1, len(each.query), width).transpose(0, 1)
            for part, each in zip(received.parts(), self.split, strict=True)
        ]
        layout = all_to_all_layout(self.group, self._outputs_sent, self._outputs_received, like.dtype)
        return OutputBuffers(received, by_rank, layout), [received.buffer]

    def to_heads(self, comm: Communicator, where: str, qkv: Qkv, buffers: TokenBuffers | None = None) -> Qkv:
        """Send tokens for heads: return all tokens of the group, [B, n, c + t, D], for the own heads.

        `qkv`: queries [B, N, a + l, D], of which those of `asking` common tokens are first, and keys and values
        [B, M, c + l, D]. `buffers`: in which this happens, see `token_buffers`. Raises ExchangeError.
        """
        buffers = buffers or self.token_buffers(qkv[0])[0]
        own: Sequence[Tensor] = qkv
        if qkv[0].requires_grad:
            own = [x.detach() for x in qkv]
        if buffers.common is not None:
            self._pack_common(self.mine.of(own), buffers.common)
            starts = (self._asking, self._common, self._common)
            own = [x.narrow(2, first, self._own) for x, first in zip(own, starts, strict=True)]
        self._pack_by_heads(own, buffers.by_rank)
        comm.all_to_all(self.group, "heads", where, buffers.sent, buffers.received, buffers.layout).wait()
        if self._by_key_groups:
            return buffers.qkv
        q_BnLD, k_BmLD, v_BmLD = buffers.qkv
        return q_BnLD, self.mine.keys_for(k_BmLD), self.mine.keys_for(v_BmLD)

    def _pack_common(self, qkv: Sequence[Tensor], into: Tensor) -> None:
        """Write the common tokens of the own heads into [c, B, n + m + m, D]; where they do not ask, no queries."""
        first = 0 if self._asking else 1
        heads = sum(x.shape[1] for x in qkv[first:])
        common = [x.narrow(2, 0, self._common) for x in qkv[first:]]
        pack_tokens(common, into=into.narrow(2, into.shape[2] - heads, heads))

    def _pack_by_heads(self, qkv: Sequence[Tensor], into: Tensor) -> None:
        """Write for each rank its heads of our tokens, by one kernel where all have equally many; see `TokenBuffers`.

        `qkv`: [B, N, l, D], and [B, M, l, D] of keys and values.
        """
        if not self._is_packed_at_once:
            torch.cat([pack_tokens(each.of(qkv)).view(-1) for each in self.split], out=into)
            return
        if self._is_single:
            by_rank = [self._heads_by_rank(x) for x in qkv]
        else:
            by_rank = [torch.unflatten(x, 1, (self.group.size, -1)).permute(1, 3, 0, 2, 4) for x in qkv]
        torch.cat(by_rank, -2, out=into)

    def _heads_by_rank(self, x: Tensor) -> Tensor:
        """Return a view [U, l, n, D] of a single sample [1, N, l, D], in one call of torch."""
        heads, (_, of_head, of_token, of_number) = x.shape[1] // self.group.size, x.stride()
        shape = self.group.size, self._own, heads, self._width
        return x.as_strided(shape, (heads * of_head, of_token, of_head, of_number))

    def to_tokens(
        self, comm: Communicator, where: str, out_BnLD: Tensor, buffers: OutputBuffers | None = None
    ) -> Tensor:
        """Send heads for tokens: return [B, N, a + l, D] from this rank's heads of all queries of the group.

        `buffers`: in which they are received, see `output_buffers`. Raises ExchangeError.
        """
        received, by_rank, layout = buffers or self.output_buffers(out_BnLD)[0]
        sent = FlatParts(self._by_tokens(out_BnLD.permute(2, 0, 1, 3)), self._outputs_sent)
        comm.all_to_all(self.group, "heads", where, sent, received, layout).wait()
        return torch.cat(by_rank, 2).transpose(1, 2)  # type: ignore[arg-type]

    def _by_tokens(self, out_LBnD: Tensor) -> Tensor:
        """Return for each rank the common tokens that ask and its own of [a + t, B, n, D], flat."""
        if not self._asking:
            return out_LBnD.reshape(-1)
        every, *own = out_LBnD.split_with_sizes((self._asking, *self.sizes))
        return torch.cat([x for part in own for x in (every, part)]).view(-1)


@lru_cache(maxsize=1024)  # every attention layer asks, in every call
def head_exchange(
    group: Axis, sizes: tuple[int, ...], shape: tuple[int, int, int], key_heads: int, common: int = 0, asking: int = 0
) -> HeadExchange:
    """Return the exchange of tensors of these shapes, see `HeadExchange`. Raises PlanError."""
    return HeadExchange(group, sizes, shape, key_heads, common, asking)
