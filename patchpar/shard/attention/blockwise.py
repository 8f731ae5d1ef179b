"""Attention of some queries to some keys as a partial result, with mask and grouped heads. Nothing is sent.

Partial results merge by their log-sum-exp, exactly and in any order (ring attention, Liu et al., arXiv:2310.01889).

Shape letters: B batch, N query heads, M key heads, l queries, k keys, D head width.
"""

import torch
from torch import Tensor

from patchpar.shard.attention.partial import Partial, attend
from patchpar.shard.attention.sharded_qkv import ShardedQKV, TokenSpan


def attend_locally(
    q_BNlD: Tensor, k_BMkD: Tensor, v_BMkD: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Partial:
    """Return output [B, N, l, D] and log-sum-exp [B, N, l]: 0 and -inf for a query whose keys are all masked.

    `bias` is added to the logits and broadcasts to [B, N, l, k].
    """
    if bias is None:
        return attend(q_BNlD, k_BMkD, v_BMkD, scale)
    bias = bias.to(q_BNlD.dtype)  # in which the smallest number of a wider dtype is -inf
    found = attend(q_BNlD, k_BMkD, v_BMkD, scale, bias=bias)
    blind_BNl = bias.isneginf().all(-1).expand(found.lse_BNl.shape)
    return Partial(
        found.out_BNlD.masked_fill(blind_BNl.unsqueeze(-1), 0.0), found.lse_BNl.masked_fill(blind_BNl, -torch.inf)
    )


def attend_own(shared: ShardedQKV) -> Partial:
    """Return attention of all this rank's queries [B, N, c + l, D] to the common keys and its own."""
    bias = shared.bias(shared.own_rows, [shared.common_span, shared.span(shared.group_rank)])
    return attend_locally(shared.q_BNlD, shared.k_BMlD, shared.v_BMlD, bias=bias, scale=shared.scale)


def attend_others(shared: ShardedQKV, group_rank: int, stacked: Tensor) -> Partial:
    """Return attention of all this rank's queries [B, N, c + l, D] to another's keys.

    `stacked`: its keys and values [2, B, M, k, D].
    """
    bias = shared.bias(shared.own_rows, [shared.span(group_rank)])
    k_BMkD, v_BMkD = stacked.unbind()
    return attend_locally(shared.q_BNlD, k_BMkD, v_BMkD, bias=bias, scale=shared.scale)


def attend_span(shared: ShardedQKV, q_BNlD: Tensor, span: TokenSpan, k_BMkD: Tensor, v_BMkD: Tensor) -> Partial:
    """Return attention of the queries of `span`, of this rank or another, to this rank's own keys."""
    bias = shared.bias([span], [shared.span(shared.group_rank)])
    return attend_locally(q_BNlD, k_BMkD, v_BMkD, bias=bias, scale=shared.scale)
