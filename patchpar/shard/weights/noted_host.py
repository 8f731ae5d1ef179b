"""Hosted weights without values: a transport that is recorded notes the copies into slots, and nothing is kept."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from torch import Tensor

from patchpar.shard.weights.packed import CopyMemory, PackedBlock
from patchpar.shard.weights.stores import BlockStore, Transfer


class NotesCopies(Protocol):
    """A transport that is recorded."""

    def copy_from_host(self, num_bytes: int, where: str) -> Transfer:
        """Note that a copy begins; its `wait` notes that it is waited for."""


class NotedHost(BlockStore):
    """Blocks in host memory that every rank maps, as on one host."""

    is_collective, num_bytes = False, 0

    def reserve(self, blocks: Sequence[PackedBlock]) -> None:
        """See BlockStore."""
        self._blocks = blocks

    def keep(self, index: int, copy: CopyMemory) -> None:
        """See BlockStore."""

    def bring(self, index: int, slot: Tensor) -> Callable[[], Transfer]:
        """See BlockStore; `slot` [bytes]."""
        assert self.comm is not None, "join comes first"
        block, transport = self._blocks[index], cast("NotesCopies", self.comm.transport)
        return partial(transport.copy_from_host, self.rows(block), f"weights of {block.name}")

    def close(self) -> None:
        """See BlockStore."""
