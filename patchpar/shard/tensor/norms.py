"""Norms over the last dim of a tensor: which modules are such, and what they compute from sums over all features.

RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467) needs the sum of squares, layer norm (Ba et al. 2016,
arXiv:1607.06450) the sum as well. Both are sums over features, so ranks that hold some features can add theirs up.
"""

from functools import cache
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.shard.precision import wide

_LAYER_NORMS, _RMS_NORMS = (nn.LayerNorm,), (nn.RMSNorm, RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """Whether a module divides by the root mean square, or the deviation, of the last dim and does nothing else."""
    if isinstance(module, nn.LayerNorm):
        return len(module.normalized_shape) == 1
    return isinstance(module, _RMS_NORMS)


def sums_of(module: nn.Module, x: Tensor) -> Tensor:
    """Return what a norm of x [..., f] needs of these features: the sum of squares and, for a layer norm, the sum.

    [..., 1] in fp32 or wider, or [..., 2] in fp64: where the mean is large, the variance is a difference of large sums.
    """
    if not isinstance(module, _LAYER_NORMS):
        return wide(x).square().sum(-1, keepdim=True)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return torch.cat([norm.square(), x.sum(-1, keepdim=True, dtype=torch.float64)], -1)


def normalized(module: nn.Module, x: Tensor, sums: Tensor, features: int) -> Tensor:
    """Return the norm of x [..., f] from the `sums_of` all `features` features; its weights are those of x.

    [..., f] in the dtype that the norm itself returns.
    """
    means = sums / features
    values = wide(x)
    variance = means[..., :1]
    if isinstance(module, _LAYER_NORMS):
        mean = means[..., 1:]
        values, variance = values - mean.to(values.dtype), (variance - mean.square()).to(values.dtype)
    eps: Any = _default_eps(x.dtype, x.device) if module.eps is None else module.eps
    values = values * torch.rsqrt(variance.clamp_min(0) + eps)
    weight: Tensor | None = getattr(module, "weight", None)
    bias: Tensor | None = getattr(module, "bias", None)
    if weight is not None:
        values = values * weight
    if bias is not None:
        values = values + bias
    return values.to(_dtype_of_output(module, x, weight, bias))


def _dtype_of_output(module: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """Return the dtype of a norm of x [..., f]: torch keeps that of x, diffusers multiplies by `weight` in its own."""
    if weight is None or not isinstance(module, RMSNorm):
        return x.dtype
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    dtype = weight.dtype if is_half else torch.promote_types(wide(x).dtype, weight.dtype)
    return dtype if bias is None else torch.promote_types(dtype, bias.dtype)


@cache
def _default_eps(dtype: torch.dtype, device: torch.device) -> float:
    """Return what torch's RMS norm takes where it is given no eps: that of this dtype, or of the one it computes in.

    Which one depends on the version of torch, so that it is seen in the norm of a small number.
    """
    x = torch.full((1,), 2.0**-4, dtype=dtype, device=device)
    known = torch.finfo(dtype).eps, torch.finfo(wide(x).dtype).eps
    if x.is_meta:
        return known[1]
    found = float(x) ** 2 * (float(F.rms_norm(x, (1,))) ** -2 - 1)
    return min(known, key=lambda eps: abs(eps - found))
