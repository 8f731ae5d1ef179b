"""Attention over a part of the keys, and its merge over all parts.

Shape letters: B batch, N heads, l queries, k keys of a part, D head width.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.shard.attention.lse_kernels import attend_with_lse
from patchpar.shard.precision import wide


class Partial(NamedTuple):
    """Attention over some of the keys: output, and log-sum-exp of the logits in fp32 or wider."""

    out_BNlD: Tensor
    lse_BNl: Tensor


def attend(
    q_BNlD: Tensor, k_BMkD: Tensor, v_BMkD: Tensor, scale: float | None = None, *, bias: Tensor | None = None
) -> Partial:
    """Return attention with its log-sum-exp, by the fused kernel of the device where there is one.

    M of the heads of keys may be shared by N / M queries each. `bias` is added to the logits and broadcasts to
    [B, N, l, k].
    """
    return Partial(*attend_with_lse(q_BNlD, k_BMkD, v_BMkD, bias, scale))


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
