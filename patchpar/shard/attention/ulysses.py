"""Ulysses (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509) and its hybrid with rings, USP (arXiv:2405.07719).

An all-to-all before attention gives each rank all tokens of its group for some of the heads; one after attention does
the reverse. Neither heads nor tokens need divide evenly. In the hybrid, groups of `degree` neighbouring ranks do this,
and another mode attends across the groups, for the heads of each rank.

sent by each rank       4 (U-1)/(U N) of the sequence for the heads, and what the other mode sends of 1/U of the heads

Messages are packed with tokens outermost, so that those of all ranks in one buffer are the tokens of the group, in
order; attention reads queries, keys and values out of it as they are.

Shape letters: as in `sharded_qkv`; n, m query and key heads of this rank, t tokens of the group, U its ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import FlatParts
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_to_all, pack_tokens, unpack_tokens
from patchpar.shard.attention.lse_kernels import expand_heads
from patchpar.shard.attention.sharded_qkv import ShardedQKV, TokenSpan, spans_of

Mode = Callable[[Communicator, Axis, str, ShardedQKV], Tensor]


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

    def keys_for(self, x_BMkD: Tensor) -> Tensor:
        """Return key heads [B, M, k, D], repeated for each of this rank's query heads where a group is cut."""
        first = self.query.start - self.key.start * self.group
        if first == 0 and len(self.query) == len(self.key) * self.group:
            return x_BMkD
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


def attend_by_heads(
    comm: Communicator, axis: Axis, where: str, shared: ShardedQKV, *, degree: int, between: Mode
) -> Tensor:
    """Return this rank's output [B, N, c + l, D]; `degree` divides the axis. Raises ExchangeError, UnsupportedModel."""
    group, across = _axes(axis, degree)
    first = axis.rank - group.rank
    sizes = shared.sizes[first : first + degree]
    try:
        split = split_heads(shared.q_BNlD.shape[1], shared.k_BMlD.shape[1], degree)
    except PlanError as error:
        raise UnsupportedModel(f"{where}: {error}") from error
    inner = tokens_to_heads(comm, group, where, shared, split, sizes)
    totals = [sum(shared.sizes[start : start + degree]) for start in range(0, axis.size, degree)]
    mine = split[group.rank].query
    inner = inner._replace(sizes=tuple(totals), group_rank=across.rank).with_heads(mine.start, mine.stop)
    if across.size == 1:
        out_BnLD = attend_to_all(inner, inner.k_BMlD, inner.v_BMlD)
    else:
        out_BnLD = between(comm, across, where, inner)
    return heads_to_tokens(comm, group, where, out_BnLD, split, (shared.asking, sizes))


@lru_cache(maxsize=1024)  # as `split_heads`
def _axes(axis: Axis, degree: int) -> tuple[Axis, Axis]:
    """Return the axis of this rank's group, and the axis of the ranks with the same index in their groups."""
    start, group_rank = axis.rank // degree * degree, axis.rank % degree
    group = Axis(axis.name, group_rank, degree, axis.ranks[start : start + degree])
    across = Axis(axis.name, axis.rank // degree, axis.size // degree, axis.ranks[group_rank::degree])
    return group, across


def tokens_to_heads(
    comm: Communicator,
    group: Axis,
    where: str,
    shared: ShardedQKV,
    split: Sequence[HeadAssignment],
    sizes: Sequence[int],
) -> ShardedQKV:
    """Send tokens for heads: return all tokens of the group, [B, n, c + t, D], for the own heads. The mask is whole."""
    mine, qkv = split[group.rank], (shared.q_BNlD, shared.k_BMlD, shared.v_BMlD)
    batch, _, _, width = shared.q_BNlD.shape
    own = [x.narrow(2, common, sizes[group.rank]) for x, common in zip(qkv, shared.beside, strict=True)]
    token = batch * sum(mine.heads) * width  # elements
    whole = own[0].new_empty((shared.common + sum(sizes), batch, sum(mine.heads), width))
    if shared.common:
        _pack_common(shared, mine.of(qkv), whole.narrow(0, 0, shared.common))
    received = FlatParts(whole.narrow(0, shared.common, sum(sizes)).view(-1), tuple(token * size for size in sizes))
    comm.all_to_all(group, "heads", where, _by_heads(own, split), received).wait()
    q_BnLD, k_BmLD, v_BmLD = unpack_tokens(whole, mine.heads)
    return shared._replace(
        q_BNlD=q_BnLD.narrow(2, shared.common - shared.asking, shared.asking + sum(sizes)),
        k_BMlD=mine.keys_for(k_BmLD),
        v_BMlD=mine.keys_for(v_BmLD),
        sizes=(sum(sizes),),
        group_rank=0,
    )


def _pack_common(shared: ShardedQKV, qkv: Sequence[Tensor], into: Tensor) -> None:
    """Write the common tokens of the own heads into [c, B, n + m + m, D]; where they do not ask, no queries."""
    first = 0 if shared.asking else 1
    heads = sum(x.shape[1] for x in qkv[first:])
    common = [x.narrow(2, 0, shared.common) for x in qkv[first:]]
    pack_tokens(common, into=into.narrow(2, into.shape[2] - heads, heads))


def _by_heads(qkv: Sequence[Tensor], split: Sequence[HeadAssignment]) -> FlatParts:
    """Return for each rank its heads of our tokens, [l, B, n + m + m, D]; by one kernel where all have equally many."""
    ranks, (batch, _, tokens, width) = len(split), qkv[0].shape
    parts = tuple(tokens * batch * sum(each.heads) * width for each in split)
    if len({each.heads for each in split}) > 1 or any(len(each.key) * ranks != qkv[1].shape[1] for each in split):
        return FlatParts(torch.cat([pack_tokens(each.of(qkv)).view(-1) for each in split]), parts)
    by_rank = [torch.unflatten(x, 1, (ranks, -1)).permute(1, 3, 0, 2, 4) for x in qkv]
    if batch == 1:
        by_rank = [x.squeeze(2) for x in by_rank]  # torch joins tensors of at most four dims by one kernel
    return FlatParts(torch.cat(by_rank, -2).view(-1), parts)


def heads_to_tokens(
    comm: Communicator,
    group: Axis,
    where: str,
    out_BnLD: Tensor,
    split: Sequence[HeadAssignment],
    tokens: tuple[int, Sequence[int]],
) -> Tensor:
    """Send heads for tokens: return [B, N, c + l, D] from `out_BnLD`, this rank's heads of all queries of the group.

    `tokens`: the number of common queries, and own tokens of each rank of the group. Raises ExchangeError.
    """
    common, sizes = tokens
    batch, _, _, width = out_BnLD.shape
    out_LBnD = out_BnLD.permute(2, 0, 1, 3)
    token, asked = batch * out_LBnD.shape[2] * width, common + sizes[group.rank]
    sent = FlatParts(_by_tokens(out_LBnD, common, sizes), tuple(token * (common + size) for size in sizes))
    parts = tuple(asked * batch * len(each.query) * width for each in split)
    received = FlatParts(out_LBnD.new_empty(sum(parts)), parts)
    comm.all_to_all(group, "heads", where, sent, received).wait()
    by_rank = [
        part.view(asked, batch, len(each.query), width).transpose(0, 1)
        for part, each in zip(received.parts(), split, strict=True)
    ]
    return torch.cat(by_rank, 2).transpose(1, 2)


def _by_tokens(out_LBnD: Tensor, common: int, sizes: Sequence[int]) -> Tensor:
    """Return for each rank the common tokens and its own of [c + t, B, n, D], flat."""
    if not common:
        return out_LBnD.contiguous().view(-1)
    every, *own = out_LBnD.split_with_sizes((common, *sizes))
    return torch.cat([x for part in own for x in (every, part)]).view(-1)
