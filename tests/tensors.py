"""Tensors that tests make and compare: noise, and how far a result is from what is wanted."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def noise(*shape: int, seed: int = 0) -> Tensor:
    """The same normal numbers every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def psnr_db(got: Tensor, want: Tensor) -> float:
    """Peak signal-to-noise ratio; the peak is the range of `want`."""
    mse = float((got.double() - want.double()).square().mean())
    return 10 * math.log10(float(want.max() - want.min()) ** 2 / mse) if mse else math.inf
