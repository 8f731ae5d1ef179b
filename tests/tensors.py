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
    off, wanted = _difference(got, want), want.double().norm()
    assert wanted > 0, "an error relative to zeros says nothing"
    return float(off.norm() / wanted)


def psnr_db(got: Tensor, want: Tensor) -> float:
    """Peak signal-to-noise ratio; the peak is the range of `want`."""
    mse = float(_difference(got, want).square().mean())
    return 10 * math.log10(float(want.max() - want.min()) ** 2 / mse) if mse else math.inf


def _difference(got: Tensor, want: Tensor) -> Tensor:
    """The difference of two tensors of one shape, all of whose numbers are finite.

    Else a NaN is passed over by `max` and by `min` wherever it does not come first, and a smaller tensor is repeated.
    """
    assert got.shape == want.shape, f"{tuple(got.shape)} is compared with {tuple(want.shape)}"
    off = got.double() - want.double()
    assert off.isfinite().all(), "a number that is not finite is compared"
    return off
