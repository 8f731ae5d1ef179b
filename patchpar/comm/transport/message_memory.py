"""Memory of an exchange that is repeated in every step, so that each time it sends and receives in the same places.

A CUDA graph repeats a step on the addresses of the step in which it was captured: what one step receives for the next
must not lie elsewhere each time.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class MessageMemory:
    """Buffers of one exchange by name, allocated when it first runs.

    Whoever starts the exchange again has read what it received before, and waited for it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._packed: Tensor | None = None
        self._offsets: Mapping[int, int] = {}

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer [size] of that name: the one of the last time, unless another is needed now."""
        found = self._buffers.get(name)
        if found is None or found.numel() != size or found.dtype != dtype or found.device != device:
            found = self._buffers[name] = torch.empty(size, dtype=dtype, device=device)
        return found

    def like(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor without values in shape and layout of `x`, of any shape: the last time's, if it fits."""
        found = self._buffers.get(name)
        if found is None or found.shape != x.shape or found.dtype != dtype or found.device != x.device:
            found = self._buffers[name] = torch.empty_like(x, dtype=dtype)
        return found

    def hold_sent(self, packed: Tensor, offsets: Mapping[int, int]) -> None:
        """Note where tensors lie in what is sent now, `packed` [elements]: their first bytes, by the tensors' ids."""
        self._packed, self._offsets = packed.view(torch.uint8), offsets

    def sent(self, x: Tensor) -> Tensor:
        """Return the copy of `x`, of any shape, in what has just been sent, which stays; `x` where it is not packed."""
        offset = self._offsets.get(id(x))
        if self._packed is None or offset is None:
            return x
        return self._packed.narrow(0, offset, x.numel() * x.element_size()).view(x.dtype).view(x.shape)

    def tensors(self) -> list[Tensor]:
        """Return all buffers [elements]."""
        return list(self._buffers.values())


def buffer_for(memory: MessageMemory | None, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a buffer [size] without values: that of `memory`, or without one a new one."""
    return torch.empty(size, dtype=dtype, device=device) if memory is None else memory.take(name, size, dtype, device)
