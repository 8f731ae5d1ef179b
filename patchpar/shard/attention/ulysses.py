"""Ulysses (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509) and its hybrid with rings, USP (arXiv:2405.07719).

Before attention tokens are exchanged for heads: a place gets all tokens of its group for some of the heads; afterwards
the other way round. Neither heads nor tokens need divide evenly. In the hybrid, groups of `degree` neighbouring places
do this, and between the groups another mode brings the rest of the tokens together, for the heads of each place.

sent by each place      4 (U-1)/(U N) of the sequence for the heads, and what the other mode sends of 1/U of the heads
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Incoming, Messages, Outgoing, TensorSpec, Work
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.blockwise import attend_own, expand_heads
from patchpar.shard.attention.sharded_qkv import ShardedQKV, TokenSpan, spans_of

Mode = Callable[[Communicator, Axis, str, ShardedQKV], Tensor]


@dataclass(frozen=True, slots=True)
class HeadAssignment:
    """Which query heads a place of the group computes, and the key heads that they need."""

    query: TokenSpan
    key: TokenSpan
    group: int

    def keys_for(self, x_BMkD: Tensor) -> Tensor:
        """One key head for each group of our query heads, or for each query head where groups are cut."""
        first = self.query.start - self.key.start * self.group
        if first == 0 and len(self.query) == len(self.key) * self.group:
            return x_BMkD
        return expand_heads(x_BMkD, len(self.key) * self.group)[:, first : first + len(self.query)]


def split_heads(heads: int, key_heads: int, group_ranks: int) -> list[HeadAssignment]:
    """Heads of every place, as evenly as possible, groups uncut where there are enough of them. Raises PlanError."""
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
    """Output [B, N, c + l, D] of this place; `degree` divides the places. Raises ExchangeError, UnsupportedModel."""
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
    out_BnLD = attend_own(inner).out_BNlD if across.size == 1 else between(comm, across, where, inner)
    return heads_to_tokens(comm, group, where, out_BnLD, split, (shared.asking, sizes))


def _axes(axis: Axis, degree: int) -> tuple[Axis, Axis]:
    """Our group of neighbouring places, and the places that have our place in their groups."""
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
    """All tokens of the group, of our heads. Sizes and place are still those of the whole."""
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
    received = _by_rank(comm.send_recv("heads", where, outgoing, incoming), group)
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
    )


def heads_to_tokens(
    comm: Communicator,
    group: Axis,
    where: str,
    out_BnLD: Tensor,
    split: Sequence[HeadAssignment],
    tokens: tuple[int, Sequence[int]],
) -> Tensor:
    """All heads of our queries and of the common ones, from some heads of all queries of the group."""
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
    received = _by_rank(comm.send_recv("heads", where, outgoing, incoming), group)
    received[group.rank] = [own]
    return torch.cat([received[group_rank][0] for group_rank in range(group.size)], 1)


def _by_rank(arriving: Work[Messages], group: Axis) -> dict[int, list[Tensor]]:
    return dict(zip(group.others, arriving.wait(), strict=True))
