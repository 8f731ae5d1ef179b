"""Attention of some queries to some keys, with mask and grouped heads, and its merge over all parts. Nothing is sent.

Partial results merge by their log-sum-exp (Milakov & Gimelshein 2018, arXiv:1805.02867), exactly and in any order, as
in ring attention (Liu et al., arXiv:2310.01889).

Shape letters: B batch, N query heads, M key heads, l queries, k keys of a part, D head width.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import is_fused
from patchpar.shard.attention.lse_kernels import attend_with_lse
from patchpar.shard.attention.sharded_qkv import ShardedQKV, TokenSpan
from patchpar.shard.kernels.merge_partials import merge_attention, merge_in_turn


class Partial(NamedTuple):
    """Attention over some of the keys: output, and log-sum-exp of the logits in fp32 or wider."""

    out_BNlD: Tensor
    lse_BNl: Tensor


def merge_partials(partials: Iterable[Partial]) -> Partial:
    """Merge attention over parts of the keys, [B, N, l, D] and [B, N, l], in fp32 (arXiv:2310.01889).

    On a GPU all parts by one kernel; elsewhere one by one, so that each is merged before the next is waited for.
    """
    parts = iter(partials)
    first = next(parts, None)
    assert first is not None, "attention over no keys"
    if not is_fused(first.out_BNlD):
        return Partial(*merge_in_turn(chain([first], parts)))
    outs, lses = [first.out_BNlD], [first.lse_BNl]
    for out_BNlD, lse_BNl in parts:
        outs.append(out_BNlD)
        lses.append(lse_BNl)
    if len(outs) == 1:
        return first
    outs, lses = laid_alike(outs), laid_alike(lses)
    return Partial(*merge_attention(outs[0], lses[0], outs[1:], lses[1:]))


def laid_alike(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors, all of the same shape, in one memory layout: they have it where they are of one kernel."""
    strides = tensors[0].stride()
    for x in tensors:  # a comprehension were a call, in every merge
        if x.stride() != strides:
            break
    else:
        return tensors
    layout = torch.empty_like(tensors[0])
    return [x if x.stride() == layout.stride() else torch.empty_like(layout).copy_(x) for x in tensors]


def attend_locally(
    q_BNlD: Tensor, k_BMkD: Tensor, v_BMkD: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Partial:
    """Return output [B, N, l, D] and log-sum-exp [B, N, l]: 0 and -inf for a query whose keys are all masked.

    By the fused kernel of the device where there is one. M heads of keys may be shared by N / M queries each. `bias` is
    added to the logits and broadcasts to [B, N, l, k].
    """
    if bias is None:
        return Partial(*attend_with_lse(q_BNlD, k_BMkD, v_BMkD, None, scale))
    bias = bias.to(q_BNlD.dtype)  # in which the smallest number of a wider dtype is -inf
    out_BNlD, lse_BNl = attend_with_lse(q_BNlD, k_BMkD, v_BMkD, bias, scale)
    blind_BNl = bias.isneginf().all(-1).expand(lse_BNl.shape)
    return Partial(out_BNlD.masked_fill(blind_BNl.unsqueeze(-1), 0.0), lse_BNl.masked_fill(blind_BNl, -torch.inf))


def attend_own(shared: ShardedQKV) -> Partial:
    """Return attention of all this rank's queries [B, N, c + l, D] to the common keys and its own."""
    bias = None
    if shared.mask is not None:
        bias = shared.bias(shared.own_rows, [shared.common_span, shared.span(shared.group_rank)])
    return attend_locally(shared.q_BNlD, shared.k_BMlD, shared.v_BMlD, bias=bias, scale=shared.scale)


def attend_others(shared: ShardedQKV, group_rank: int, stacked: Tensor) -> Partial:
    """Return attention of all this rank's queries [B, N, c + l, D] to another's keys.

    `stacked`: its keys and values [2, B, M, k, D].
    """
    bias = None if shared.mask is None else shared.bias(shared.own_rows, [shared.span(group_rank)])
    k_BMkD, v_BMkD = stacked.unbind()
    return attend_locally(shared.q_BNlD, k_BMkD, v_BMkD, bias=bias, scale=shared.scale)


def attend_span(shared: ShardedQKV, q_BNlD: Tensor, span: TokenSpan, k_BMkD: Tensor, v_BMkD: Tensor) -> Partial:
    """Return attention of the queries of `span`, of this rank or another, to this rank's own keys."""
    bias = shared.bias([span], [shared.span(shared.group_rank)])
    return attend_locally(q_BNlD, k_BMkD, v_BMkD, bias=bias, scale=shared.scale)
