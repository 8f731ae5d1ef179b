"""Copies between a GPU and the host through pinned memory, so that the process does not wait for the GPU.

A copy from or to pageable memory is staged by the driver and blocks the process until the GPU has come to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchpar.launch.accelerators import device_module


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return `x`, of any shape, on `device`; from host memory without waiting where `device` is a GPU.

    The pinned copy is kept by torch until the GPU has read it.
    """
    if x.device.type != "cpu" or device.type == "cpu" or not _has_events(device):
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor of any shape in host memory. The constructor starts it; `wait` blocks only until it is done.

    A tensor of the CPU is not copied.
    """

    def __init__(self, x: Tensor) -> None:
        self._copy = x
        self._done: Any = None  # an event of the GPU
        if x.device.type == "cpu":
            return
        if not _has_events(x.device):
            self._copy = x.cpu()
            return
        self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._copy.copy_(x, non_blocking=True)
        self._done = device_module(x.device.type).current_stream(x.device).record_event()  # where the copy runs

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> Tensor:
        """Return the copy, of the same shape."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy


def to_host(x: Tensor) -> Tensor:
    """Return `x`, of any shape, in host memory: pinned where it comes from a GPU."""
    return HostCopy(x).wait()


def _has_events(device: torch.device) -> bool:
    """Whether copies of this type of device can be asynchronous: there is pinned memory, and an event at their end."""
    return device.type != "meta" and hasattr(device_module(device.type), "mem_get_info")
