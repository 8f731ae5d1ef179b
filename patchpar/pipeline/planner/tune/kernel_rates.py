"""Rates of a device's kernels over a grid of shapes: products, convolutions, attention, and what the memory limits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.pipeline.planner.tune.timer import DeviceTimer
from patchpar.plan.replay.measured_device import COPY, FUNCTION, NORM, KernelRate, MeasuredDevice, MovedBytes

HEADS = 4
HALVES = {torch.float16, torch.bfloat16}
"""Dtypes whose rates are taken to be equal."""
OTHERS = (torch.float32, torch.bfloat16, torch.float16)
WIDTH = 256
"""Of rows of kernels that the memory limits."""
MOVING: dict[str, Callable[[Tensor], Tensor]] = {
    COPY: lambda x_NC: x_NC + 1,
    FUNCTION: F.gelu,
    NORM: lambda x_NC: F.layer_norm(x_NC, x_NC.shape[-1:]),
}


def measured_device(timer: DeviceTimer, dtype: torch.dtype, name: str, memory: int) -> MeasuredDevice:
    """Return the rates of a timer's device in `dtype`, without what calls of a network add; 2 to 4 s on a CPU.

    `memory`: bytes of the device.
    """
    small = timer.device.type == "cpu"
    sizes = ((64, 256, 1024), (128, 512, 1536)) if small else ((256, 1024, 4096, 16384), (320, 1536, 3072))
    maps = ((48, 64), (96, 32), (128, 16), (320, 8)) if small else ((128, 512), (320, 128), (640, 64), (1280, 32))
    tokens = (64, 256, 1024) if small else (256, 1024, 4096, 16384)
    make = _Maker(timer.device, dtype)
    products = tuple(_product(timer, make, *dims) for dims in product(sizes[0], sizes[1], sizes[1]))
    convolutions = tuple(_convolution(timer, make, *each) for each in maps)
    one = (256, 512, 512) if small else (4096, 3072, 3072)
    return MeasuredDevice(
        name=name,
        memory=memory,
        dtype=str(dtype).removeprefix("torch."),
        beside_host=not small,
        products=products,
        convolutions=convolutions,
        attention=tuple(_attention(timer, make, *each) for each in product(tokens, (32, 64) if small else (64, 128))),
        moving={kind: tuple(_moved(timer, make, run, small=small)) for kind, run in MOVING.items()},
        other_dtypes=_other_dtypes(dtype, products, lambda other: _product(timer, make.of(other), *one)),
        other_convolutions=_other_dtypes(
            dtype, convolutions, lambda other: _convolution(timer, make.of(other), *maps[0])
        ),
    )


def _other_dtypes(
    dtype: torch.dtype, measured: Sequence[KernelRate], measure: Callable[[torch.dtype], KernelRate]
) -> dict[str, float]:
    """Return how many times as fast as in `dtype` one of the `measured` is in each other dtype that the device has."""
    rates = {each.dims: each.rate for each in measured}
    found: dict[str, float] = {}
    for other in OTHERS:
        if other == dtype or {other, dtype} <= HALVES:
            continue
        with suppress(RuntimeError):  # the device has no such kernel
            there = measure(other)
            found[str(other).removeprefix("torch.")] = there.rate / rates[there.dims]
    return found


class _Maker:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def of(self, dtype: torch.dtype) -> "_Maker":
        """Return what makes values in another dtype."""
        return _Maker(self._device, dtype)

    def __call__(self, *shape: int) -> Tensor:
        """Return random values of a shape, of any dims."""
        return torch.randn(shape, device=self._device).to(self._dtype)


def _product(timer: DeviceTimer, make: _Maker, m: int, n: int, k: int) -> KernelRate:
    x_mk, weight_nk, bias_n = make(m, k), make(n, k), make(n)
    seconds = timer.best(lambda: F.linear(x_mk, weight_nk, bias_n))
    return KernelRate(dims=(m, n, k), rate=2 * m * n * k / seconds)


def _convolution(timer: DeviceTimer, make: _Maker, channels: int, side: int) -> KernelRate:
    x_BCHW, weight = make(1, channels, side, side), make(channels, channels, 3, 3)
    seconds = timer.best(lambda: F.conv2d(x_BCHW, weight, padding=1))
    dims = side * side, channels, 9 * channels
    return KernelRate(dims=dims, rate=2 * dims[0] * dims[1] * dims[2] / seconds)


def _attention(timer: DeviceTimer, make: _Maker, tokens: int, width: int) -> KernelRate:
    x_BNlD = make(1, HEADS, tokens, width)
    seconds = timer.best(lambda: F.scaled_dot_product_attention(x_BNlD, x_BNlD, x_BNlD))
    return KernelRate(dims=(tokens, width), rate=4 * HEADS * tokens * tokens * width / seconds)


def _moved(timer: DeviceTimer, make: _Maker, run: Callable[[Tensor], Tensor], *, small: bool) -> Iterator[MovedBytes]:
    for rows in (4, 256, 4096) if small else (64, 16384, 262144):
        x_NC = make(rows, WIDTH)
        num_bytes = 2 * x_NC.numel() * x_NC.element_size()
        yield MovedBytes(num_bytes=num_bytes, seconds=timer.best(lambda x_NC=x_NC: run(x_NC)))  # type: ignore[misc]
