"""Attention of some queries to some keys as a partial result, with mask and grouped heads. Nothing is sent.

Partial results merge by their log-sum-exp, exactly and in any order (ring attention, Liu et al., arXiv:2310.01889).

Shape letters: B batch, N query heads, M key heads, l queries, k keys, D head width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.shard.attention.partial import Partial, attend
from patchpar.shard.attention.sharded_qkv import ShardedQKV, TokenSpan
from patchpar.shard.precision import wide

ALIGNED = 16  # elements to which the kernel needs rows of its bias aligned


def attend_locally(
    q_BNlD: Tensor, k_BMkD: Tensor, v_BMkD: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Partial:
    """Return output [B, N, l, D] and log-sum-exp [B, N, l]: 0 and -inf for a query whose keys are all masked.

    `bias` is added to the logits and broadcasts to [B, N, l, k].
    """
    k_BNkD, v_BNkD = (expand_heads(x, q_BNlD.shape[1]) for x in (k_BMkD, v_BMkD))
    if bias is None:
        return attend(q_BNlD, k_BNkD, v_BNkD, scale)
    found = _attend_biased(q_BNlD, k_BNkD, v_BNkD, bias, scale)
    blind_BNl = bias.isneginf().all(-1).expand(found.lse_BNl.shape)
    return Partial(
        found.out_BNlD.masked_fill(blind_BNl.unsqueeze(-1), 0.0), found.lse_BNl.masked_fill(blind_BNl, -torch.inf)
    )


def _attend_biased(q_BNlD: Tensor, k_BNkD: Tensor, v_BNkD: Tensor, bias: Tensor, scale: float | None) -> Partial:
    bias = bias.to(q_BNlD.dtype).expand(q_BNlD.shape[0], q_BNlD.shape[1], q_BNlD.shape[2], k_BNkD.shape[2])
    if q_BNlD.device.type == "cpu":
        return Partial(
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_BNlD, k_BNkD, v_BNkD, attn_mask=bias, scale=scale
            )
        )
    if q_BNlD.device.type == "cuda":
        keys, queries = k_BNkD.shape[2], q_BNlD.shape[2]
        bias = F.pad(bias, (0, -keys % ALIGNED))[..., :keys]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q_BNlD, k_BNkD, v_BNkD, bias, True, scale=scale
        )
        return Partial(out, lse[..., :queries])
    logits_BNlk = (wide(q_BNlD) @ wide(k_BNkD).mT) * (scale or q_BNlD.shape[-1] ** -0.5) + wide(bias)
    out_BNlD = logits_BNlk.softmax(-1).nan_to_num() @ wide(v_BNkD)
    return Partial(out_BNlD.to(q_BNlD.dtype), logits_BNlk.logsumexp(-1))


def expand_heads(x_BMkD: Tensor, heads: int) -> Tensor:
    """Return grouped keys or values [B, M, k, D] repeated to one for each query head, [B, heads, k, D]."""
    group = heads // x_BMkD.shape[1]
    return x_BMkD if group == 1 else x_BMkD.repeat_interleave(group, dim=1)


def attend_own(shared: ShardedQKV) -> Partial:
    """Return attention of all this rank's queries [B, N, c + l, D] to the common keys and its own."""
    bias = shared.bias(shared.own_rows, [shared.common_span, shared.span(shared.group_rank)])
    return attend_locally(shared.q_BNlD, shared.k_BMlD, shared.v_BMlD, bias=bias, scale=shared.scale)


def attend_others(shared: ShardedQKV, group_rank: int, k_BMkD: Tensor, v_BMkD: Tensor) -> Iterator[Partial]:
    """Yield attention of all this rank's queries to another's keys; nothing where causality masks all of them."""
    if shared.causal and group_rank > shared.group_rank:
        return
    bias = shared.bias(shared.own_rows, [shared.span(group_rank)])
    yield attend_locally(shared.q_BNlD, k_BMkD, v_BMkD, bias=bias, scale=shared.scale)


def attend_span(shared: ShardedQKV, q_BNlD: Tensor, span: TokenSpan, k_BMkD: Tensor, v_BMkD: Tensor) -> Partial:
    """Return attention of the queries of `span`, of this rank or another, to this rank's own keys."""
    bias = shared.bias([span], [shared.span(shared.group_rank)])
    return attend_locally(q_BNlD, k_BMkD, v_BMkD, bias=bias, scale=shared.scale)
