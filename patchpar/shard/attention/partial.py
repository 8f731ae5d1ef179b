"""Attention over a part of the keys, and its merge over all parts.

Shape letters: B batch, N heads, l queries, k keys of a part, D head width.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.shard.precision import wide


class Partial(NamedTuple):
    """Attention over some of the keys: output, and log-sum-exp of the logits in fp32 or wider."""

    out_BNlD: Tensor
    lse_BNl: Tensor


def attend(q_BNlD: Tensor, k_BNkD: Tensor, v_BNkD: Tensor, scale: float | None = None) -> Partial:
    """Return attention with its log-sum-exp, by the fused kernel of the device where there is one."""
    if q_BNlD.device.type == "cpu":
        return Partial(*torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BNlD, k_BNkD, v_BNkD, scale=scale))
    if q_BNlD.device.type == "cuda" and q_BNlD.dtype != torch.float64:  # no kernel takes fp64
        length = q_BNlD.shape[2]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q_BNlD, k_BNkD, v_BNkD, None, True, scale=scale
        )
        return Partial(out, lse[..., :length])  # this kernel pads the log-sum-exp to a multiple of 32 queries
    logits_BNlk = (wide(q_BNlD) @ wide(k_BNkD).mT) * (scale or q_BNlD.shape[-1] ** -0.5)
    out_BNlD = logits_BNlk.softmax(-1) @ wide(v_BNkD)
    return Partial(out_BNlD.to(q_BNlD.dtype), logits_BNlk.logsumexp(-1))


def merge_partials(partials: Iterable[Partial]) -> Partial:
    """Merge attention over parts of the keys, [B, N, l, D] and [B, N, l], one by one in fp32 (arXiv:2310.01889)."""
    out: Tensor | None = None
    lse: Tensor | None = None
    dtype = torch.float32
    for partial in partials:
        if out is None or lse is None:
            (out, lse), dtype = partial, partial.out_BNlD.dtype
            continue
        ahead_BNl = (partial.lse_BNl - lse).nan_to_num()  # -inf in both for a query with all keys of both masked
        weight_BNl1 = torch.sigmoid(ahead_BNl).unsqueeze(-1)
        out = torch.lerp(wide(out), wide(partial.out_BNlD), weight_BNl1)
        lse = torch.logaddexp(lse, partial.lse_BNl)
    assert out is not None, "attention over no keys"
    assert lse is not None
    return Partial(out.to(dtype), lse)
