"""Copies from the host to a GPU in a stream of their own, beside the computation; on other devices at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from patchpar.launch.accelerators import device_module, is_accelerator


class CopyStream:
    """The stream of one device in which weights are copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module = device_module(device.type) if is_accelerator(str(device)) else None
        self._module: Any = module if hasattr(module, "Stream") and hasattr(module, "stream") else None
        self._stream = None if self._module is None else self._module.Stream(device)
        self._at_once = StreamCopy(None, self._module, device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context whose operations run in the stream, after what the device computes until now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> "StreamCopy":
        """Start to copy into the first of each pair, of any shape, the second, on the host and of the same shape."""
        if self._stream is None:
            for into, x in pairs:
                into.copy_(x, non_blocking=True)
            return self._at_once
        with self.beside():
            for into, x in pairs:
                into.copy_(x, non_blocking=True)
                if into.device.type == self._device.type:
                    into.record_stream(self._stream)  # what is freed meanwhile is used again after the copy
            event = self._module.Event()
            event.record(self._stream)
        return StreamCopy(event, self._module, self._device)

    def finish(self) -> None:
        """Block until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class StreamCopy:
    """Copies that have been started."""

    def __init__(self, event: Any, module: Any, device: torch.device) -> None:
        self._event, self._module, self._device = event, module, device

    def wait(self) -> None:
        """Let the device's current stream wait for them."""
        if self._event is not None:
            self._module.current_stream(self._device).wait_event(self._event)
