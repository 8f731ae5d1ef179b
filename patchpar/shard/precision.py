"""Floating-point format of sums, of products of fp32 numbers on GPUs, and of autocast."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from patchpar.launch.accelerators import CUDA

EXACT = "ieee"
"""torch's name for products of fp32 numbers as they are."""


def wide(x: Tensor) -> Tensor:
    """Return `x`, of any shape, in fp32, or in fp64 if it is: the format of sums and moments."""
    return x if x.dtype == torch.float64 else x.float()


def has_rounded_products(x: Tensor) -> bool:
    """Return whether products of `x`, of any shape, and of its like are rounded to TF32, which has ten bits of fp16.

    GPUs do so for convolutions in fp32 unless a program switches it off (torch.backends.cudnn.allow_tf32).
    """
    if x.device.type != CUDA or x.dtype != torch.float32:
        return False
    return any(getattr(*each) not in (False, EXACT) for each in _switches())


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of autocast on devices of a type; None where it is off in this thread."""
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


class _FullPrecision:
    """torch's switches, which a whole process has: off from the first thread that asks for it to the last."""

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0
        self._before: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Switch them off, unless another thread has."""
        with self._lock:
            self._threads += 1
            if self._threads > 1:
                return
            self._before = [(owner, name, getattr(owner, name)) for owner, name in _switches()]
            for owner, name, value in self._before:
                if value not in (False, EXACT):
                    setattr(owner, name, EXACT if isinstance(value, str) else False)

    def end(self) -> None:
        """Set them to what they were before, unless another thread still computes with them."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
            for owner, name, value in self._before:
                if getattr(owner, name) != value:
                    setattr(owner, name, value)


_FULL_PRECISION = _FullPrecision()  # one for the process, as the switches are


@contextmanager
def full_precision() -> Iterator[None]:
    """Context in which products of fp32 numbers are not rounded to TF32 on GPUs. Of several threads at a time."""
    _FULL_PRECISION.begin()
    try:
        yield
    finally:
        _FULL_PRECISION.end()


def _switches() -> Iterator[tuple[Any, str]]:
    """Yield the switches of convolutions and of matrices, the old ones where torch has not been given the new ones."""
    for old, new in ((torch.backends.cudnn, "cudnn.conv"), (torch.backends.cuda.matmul, "cuda.matmul")):
        try:
            _ = old.allow_tf32
        except RuntimeError:
            folder, _, name = new.partition(".")
            yield getattr(getattr(torch.backends, folder), name), "fp32_precision"
        else:
            yield old, "allow_tf32"
