"""Tensors that tests make and compare: noise, and how far a result is from what is wanted."""

from __future__ import annotations

import math
from typing import Any

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


class Elsewhere(Tensor):
    """Stands for a tensor on a device that is not there: its values can only be copied to the host."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what reads values, but for copies."""
        is_copy = func is Tensor.cpu or (func is Tensor.to and "cpu" in args[1:])
        if is_copy:
            return super().__torch_function__(func, types, args, kwargs or {}).as_subclass(Tensor)
        if func not in KNOWN and getattr(func, "__name__", "") != "__get__":  # properties such as shape
            raise RuntimeError("expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})


KNOWN = (Tensor.is_floating_point, Tensor.detach, Tensor.to, Tensor.requires_grad_, Tensor.as_subclass, Tensor.clone)


def elsewhere(x: Tensor) -> Tensor:
    """Return a tensor as if it were on another device, of the same shape."""
    return x.as_subclass(Elsewhere)
