"""Floating-point format of sums, of products of fp32 numbers, and of autocast."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from patchpar.launch.accelerators import CUDA

EXACT = "ieee"
"""torch's name for products of fp32 numbers as they are."""
AS_THEY_ARE = (False, EXACT, "none")


def wide(x: Tensor) -> Tensor:
    """Return `x`, of any shape, in fp32, or in fp64 if it is: the format of sums and moments."""
    return x if x.dtype == torch.float64 else x.float()


def rounded_products(x: Tensor) -> str:
    """Return "tf32" or "bf16" if products of `x`, of any shape, and of its like are rounded to it; else nothing.

    GPUs round to TF32, which has ten bits of fp16, for convolutions in fp32 unless a program switches it off
    (torch.backends.cudnn.allow_tf32). CPUs round if a program allows it (torch.set_float32_matmul_precision).
    """
    if x.device.type not in (CUDA, "cpu") or x.dtype != torch.float32:
        return ""
    switches = _switches() if x.device.type == CUDA else _switches_of_cpus()
    found = {value for each in switches if (value := getattr(*each)) not in AS_THEY_ARE}
    return "bf16" if "bf16" in found else "tf32" if found else ""


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
            every = *_switches(), *_switches_of_cpus()
            self._before = [(owner, name, getattr(owner, name)) for owner, name in every]
            for owner, name, value in self._before:
                if value not in AS_THEY_ARE:
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
    """Context in which products of fp32 numbers are not rounded to fewer bits. Of several threads at a time."""
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


def _switches_of_cpus() -> Iterator[tuple[Any, str]]:
    """Yield the switches of matrices and of convolutions in torch from 2.9 on; the old one where torch can read it."""
    for name in ("matmul", "conv"):
        owner = getattr(torch.backends.mkldnn, name, None)
        if name == "matmul" and _OfMatrices.is_readable():
            yield _OfMatrices(), "fp32_precision"
        elif hasattr(owner, "fp32_precision"):
            yield owner, "fp32_precision"


class _OfMatrices:
    """The old switch of matrices, which torch cannot read any more after the new one has been set."""

    _NAMES: Final = {"highest": EXACT, "high": "tf32", "medium": "bf16"}

    @staticmethod
    def is_readable() -> bool:
        try:
            torch.get_float32_matmul_precision()
        except RuntimeError:
            return False
        return True

    @property
    def fp32_precision(self) -> str:
        """torch's new name of what it is."""
        return self._NAMES[torch.get_float32_matmul_precision()]

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(next(old for old, new in self._NAMES.items() if new == value))
