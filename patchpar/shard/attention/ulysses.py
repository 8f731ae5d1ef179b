"""Ulysses (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509) and its hybrid with rings, USP (arXiv:2405.07719).

An all-to-all before attention gives each rank all tokens of its group for some of the heads; one after attention does
the reverse. Neither heads nor tokens need divide evenly. In the hybrid, groups of `degree` neighbouring ranks do this,
and another mode attends across the groups, for the heads of each rank.

sent by each rank       4 (U-1)/(U N) of the sequence for the heads, and what the other mode sends of 1/U of the heads

Shape letters: as in `sharded_qkv`; n, m query and key heads of this rank, t tokens of the group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Incoming, Messages, Outgoing, TensorSpec, Work
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_to_all
from patchpar.shard.attention.lse_kernels import expand_heads
from patchpar.shard.attention.sharded_qkv import ShardedQKV, TokenSpan, spans_of

Mode = Callable[[Communicator, Axis, str, ShardedQKV], Tensor]


@dataclass(frozen=True, slots=True)
class HeadAssignment:
    """Query heads that a rank of the group computes, and the key heads that they need."""

    query: TokenSpan
    key: TokenSpan
    group: int

    def keys_for(self, x_BMkD: Tensor) -> Tensor:
        """Return key heads [B, M, k, D], repeated for each of this rank's query heads where a group is cut."""
        first = self.query.start - self.key.start * self.group
        if first == 0 and len(self.query) == len(self.key) * self.group:
            return x_BMkD
        return expand_heads(x_BMkD, len(self.key) * self.group)[:, first : first + len(self.query)]


def split_heads(heads: int, key_heads: int, group_ranks: int) -> list[HeadAssignment]:
    """Return the heads of every rank, as even as possible; groups are cut only where too few. Raises PlanError."""
    if group_ranks > heads:
        raise PlanError(f"{heads} attention heads cannot be shared by {group_ranks} ranks: use ulysses={heads} or less")
    group = heads // key_heads
    unit = group if key_heads >= group_ranks else 1
    units = heads // unit
    sizes = [unit * (units // group_ranks + (group_rank < units % group_ranks)) for group_rank in range(group_ranks)]
    return [
        HeadAssignment(span, TokenSpan(span.start // group, -(-span.stop // group)), group) for span in spans_of(sizes)
    ]


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
    inner = replace(inner, sizes=tuple(totals), group_rank=across.rank).with_heads(mine.start, mine.stop)
    if across.size == 1:
        out_BnLD = attend_to_all(inner, inner.k_BMlD, inner.v_BMlD)
    else:
        out_BnLD = between(comm, across, where, inner)
    return heads_to_tokens(comm, group, where, out_BnLD, split, (shared.asking, sizes))


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
    mine = split[group.rank]
    tensors = (shared.q_BNlD, shared.k_BMlD, shared.v_BMlD)

    def of_heads(heads: HeadAssignment) -> list[Tensor]:
        spans = (heads.query, heads.key, heads.key)
        return [x[:, span.start : span.stop] for x, span in zip(tensors, spans, strict=True)]

    def own_tokens(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x[:, :, common:] for x, common in zip(tensors, shared.beside, strict=True)]

    def specs(group_rank: int) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec((x.shape[0], x.shape[1], sizes[group_rank], x.shape[3]), x.dtype) for x in own)

    own = of_heads(mine)
    outgoing = [
        Outgoing((group.ranks[group_rank],), tuple(x.contiguous() for x in own_tokens(of_heads(split[group_rank]))))
        for group_rank in group.others
    ]
    incoming = [Incoming(group.ranks[group_rank], specs(group_rank)) for group_rank in group.others]
    received = _by_rank(comm.send_recv("heads", where, outgoing, incoming, group), group)
    received[group.rank] = own_tokens(own)
    whole = [
        torch.cat(
            [x[:, :, : shared.beside[index]], *(received[group_rank][index] for group_rank in range(group.size))], 2
        )
        for index, x in enumerate(own)
    ]
    total = sum(sizes)
    return ShardedQKV(
        q_BNlD=whole[0],
        k_BMlD=mine.keys_for(whole[1]),
        v_BMlD=mine.keys_for(whole[2]),
        sizes=(total,),
        group_rank=0,
        common=shared.common,
        common_asks=shared.common_asks,
        mask=shared.mask,
        causal=shared.causal,
        scale=shared.scale,
        kernel=shared.kernel,
    )


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
    spans = spans_of(sizes)

    def of(group_rank: int) -> Tensor:
        span = spans[group_rank]
        return torch.cat([out_BnLD[:, :, :common], out_BnLD[:, :, common + span.start : common + span.stop]], 2)

    own = of(group.rank)
    shape = (own.shape[0], own.shape[2], own.shape[3])

    def spec(group_rank: int) -> TensorSpec:
        return TensorSpec((shape[0], len(split[group_rank].query), shape[1], shape[2]), own.dtype)

    outgoing = [Outgoing((group.ranks[group_rank],), (of(group_rank),)) for group_rank in group.others]
    incoming = [Incoming(group.ranks[group_rank], (spec(group_rank),)) for group_rank in group.others]
    received = _by_rank(comm.send_recv("heads", where, outgoing, incoming, group), group)
    received[group.rank] = [own]
    return torch.cat([received[group_rank][0] for group_rank in range(group.size)], 1)


def _by_rank(arriving: Work[Messages], group: Axis) -> dict[int, list[Tensor]]:
    return dict(zip(group.others, arriving.wait(), strict=True))
