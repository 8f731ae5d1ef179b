"""Ulysses (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509) and its hybrid with rings, USP (arXiv:2405.07719).

An all-to-all before attention gives each rank all tokens of its group for some of the heads; one after attention does
the reverse. Neither heads nor tokens need divide evenly. In the hybrid, groups of `degree` neighbouring ranks do this,
and another mode attends across the groups, for the heads of each rank.

sent by each rank       4 (U-1)/(U N) of the sequence for the heads, and what the other mode sends of 1/U of the heads

Shape letters: as in `sharded_qkv`; n query heads of this rank, t tokens of the group, U its ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_to_all
from patchpar.shard.attention.attention_memory import Made
from patchpar.shard.attention.head_exchange import HeadExchange, TokenBuffers, head_exchange
from patchpar.shard.attention.sharded_qkv import ShardedQKV

Mode = Callable[[Communicator, Axis, str, ShardedQKV], Tensor]


def attend_by_heads(
    comm: Communicator, axis: Axis, where: str, shared: ShardedQKV, *, degree: int, between: Mode
) -> Tensor:
    """Return this rank's output [B, N, c + l, D]; `degree` divides the axis. Raises ExchangeError, UnsupportedModel."""
    like = shared.q_BNlD
    facts = (axis, degree, shared.sizes, like.shape, shared.k_BMlD.shape, shared.common_asks, like.dtype)
    try:
        plan = shared.buffers(facts, partial(_Plan.made, axis, degree, shared))
    except PlanError as error:
        raise UnsupportedModel(f"{where}: {error}") from error
    across, exchange = plan.across, plan.exchange
    qkv = exchange.to_heads(comm, where, (like, shared.k_BMlD, shared.v_BMlD), plan.tokens)
    if shared.memory is not None:
        shared.memory.free(plan.tokens.sent.buffer)
    if across.size == 1 and shared.mask is None:
        out_BnLD = shared.attend_to(*qkv, None)
    else:
        q_BnLD, k_BmLD, v_BmLD = qkv
        inner = shared._replace(
            q_BNlD=q_BnLD, k_BMlD=k_BmLD, v_BMlD=v_BmLD, sizes=plan.totals, group_rank=across.rank
        ).with_heads(*exchange.mine.query)
        alone = across.size == 1
        out_BnLD = attend_to_all(inner, k_BmLD, v_BmLD) if alone else between(comm, across, where, inner)
    outputs = shared.buffers((exchange, like.dtype), partial(exchange.output_buffers, like))
    return exchange.to_tokens(comm, where, out_BnLD, outputs)


class _Plan(NamedTuple):
    """What is the same in every step. `totals`: tokens of each group, by the group ranks of `across`."""

    across: Axis
    totals: tuple[int, ...]
    exchange: HeadExchange
    tokens: TokenBuffers

    @classmethod
    def made(cls, axis: Axis, degree: int, shared: ShardedQKV) -> "Made[_Plan]":
        """Return it with its buffers. Raises PlanError."""
        group, across = _axes(axis, degree)
        first, sizes, like = axis.rank - group.rank, shared.sizes, shared.q_BNlD
        totals = tuple(sum(sizes[start : start + degree]) for start in range(0, axis.size, degree))
        shape, key_heads = (like.shape[0], like.shape[1], like.shape[3]), shared.k_BMlD.shape[1]
        own_sizes, common = sizes[first : first + degree], (shared.common, shared.asking)
        exchange = head_exchange(group, own_sizes, shape, key_heads, *common)
        tokens, buffers = exchange.token_buffers(like)
        return cls(across, totals, exchange, tokens), buffers


def _axes(axis: Axis, degree: int) -> tuple[Axis, Axis]:
    """Return the axis of this rank's group, and the axis of the ranks with the same index in their groups."""
    start, group_rank = axis.rank // degree * degree, axis.rank % degree
    group = Axis(axis.name, group_rank, degree, axis.ranks[start : start + degree])
    across = Axis(axis.name, axis.rank // degree, axis.size // degree, axis.ranks[group_rank::degree])
    return group, across
