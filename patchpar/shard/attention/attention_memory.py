"""Buffers in which attention layers exchange tokens, one layer after the other, with views that are made once.

Between two layers the buffers have no memory: their storages are resized to nothing and back, as FSDP does with
parameters that it gathers, which takes less of the process's time than new tensors and views of these.

For operations of all ranks alone, whose order on the device's stream keeps a layer from writing before the last one has
read; and not where gradients are recorded, which need what was read. Without such memory each layer allocates its own.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm
from patchpar.comm.exchange_part import collectives_of

T = TypeVar("T")
Made = tuple[T, Sequence[Tensor]]
"""What a layer uses, and the buffers in it, of any shape, of which each has a storage of its own."""


def reuses_buffers(mesh: AxisComm) -> bool:
    """Whether layers may exchange in the same buffers: ranks have operations of all of them, and tensors values.

    What is recorded without values, call by call, counts the memory of each layer alone.
    """
    comm, axis = mesh
    return comm.transport.device.type != "meta" and collectives_of(comm.transport, axis.ranks) is not None


class AttentionMemory:
    """The buffers of all layers of a denoiser call, by what they hold: layers that exchange alike have the same."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Any, list[tuple[torch.UntypedStorage, int]]]] = {}
        self._taken: list[tuple[torch.UntypedStorage, int]] = []

    def take(self, key: Hashable, make: Callable[[], Made[T]]) -> T:
        """Return what `make` returned when it was first asked for by `key`, which determines it: without values."""
        known = self._found.get(key)
        if known is None:
            made, buffers = make()
            storages = [x.untyped_storage() for x in buffers]
            known = self._found[key] = made, [(each, each.nbytes()) for each in storages]
        else:
            for storage, size in known[1]:
                storage.resize_(size)
        self._taken += known[1]
        found: T = known[0]
        return found

    def free(self, buffer: Tensor) -> None:
        """Free the memory of one of the buffers that have been taken, of any shape, before the others."""
        buffer.untyped_storage().resize_(0)

    def release(self) -> None:
        """Free the memory of all buffers that have been taken: what is in them is of no use any more."""
        for storage, _ in self._taken:
            storage.resize_(0)
        self._taken.clear()
