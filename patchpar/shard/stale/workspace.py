"""Memory that exchange points use one after the other, without keeping values in it."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


class Workspace:
    """Memory that the exchange points of a call use one after the other: it keeps no values from one to the next."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._taken: dict[tuple[tuple[int, ...], torch.dtype, torch.device], Tensor] = {}

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a tensor of `shape` without values. `like`, of any shape, has its dtype and device.

        The same tensor for the same shape, as long as the memory is large enough.
        """
        key = (shape, like.dtype, like.device)
        found = self._taken.get(key)
        if found is None:
            found = self._taken[key] = self._memory_for(shape, like)
        return found

    def _memory_for(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        num_bytes = math.prod(shape) * like.element_size()
        memory = self._memory
        if memory is None or memory.device != like.device or memory.numel() < num_bytes:
            memory = self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
            self._taken.clear()
        return memory[:num_bytes].view(like.dtype).view(shape)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory [bytes], if any."""
        if self._memory is not None:
            yield self._memory
