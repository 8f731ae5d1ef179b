"""Norms over the last dim of a tensor: which modules are such, and what they compute from sums over all features.

RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467) needs the sum of squares, layer norm (Ba et al. 2016,
arXiv:1607.06450) the sum as well. Both are sums over features, so ranks that hold some features can add theirs up.
"""

from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

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

    [..., f] in the dtype of x.
    """
    means = sums / features
    values = wide(x)
    variance = means[..., :1]
    if isinstance(module, _LAYER_NORMS):
        mean = means[..., 1:]
        values, variance = values - mean.to(values.dtype), (variance - mean.square()).to(values.dtype)
    eps: Any = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    values = values * torch.rsqrt(variance.clamp_min(0) + eps)
    weight: Tensor | None = getattr(module, "weight", None)
    bias: Tensor | None = getattr(module, "bias", None)
    if weight is not None:
        values = values * weight
    if bias is not None:
        values = values + bias
    return values.to(x.dtype)
