"""Sharded weights: every rank keeps a part of each block in the memory of its device, and all gather it into a slot.

ranks of GPUs, or of several hosts    parts are sent
CPUs of one host                      parts are mapped by all ranks, and used where they lie
the same, with weights in files       nothing is copied: the system has one copy of a file for all ranks
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.known_exchange import KnownGather, KnownRead, known_gather
from patchpar.comm.transport import register_memory, unregister_memory, uses_host_memory
from patchpar.errors import PlanError
from patchpar.launch.file_pages import FilePages
from patchpar.plan.mesh import Axis
from patchpar.shard.verification import is_alike
from patchpar.shard.weights.host_segment import HostSegment, segments_of_all
from patchpar.shard.weights.mapped_parts import BlockInParts
from patchpar.shard.weights.packed import CopyMemory, PackedBlock, copy_memory
from patchpar.shard.weights.placed import PlacedBlock
from patchpar.shard.weights.stores import KIND, BlockStore, Transfer, moved_by_all


class DeviceShards(BlockStore):
    """Shards in the memory of the device, which are gathered from all ranks of the axis. Raises PlanError for one.

    On CPUs of one host the other ranks map them, and use in place what does not lie in several shards. A block whose
    weights are in files that all these ranks have mapped stays there. `pages`: those files, if they have been listed
    since the weights were loaded.
    """

    is_collective = True

    def __init__(self, axis: Axis, device: torch.device, pages: FilePages | None = None) -> None:
        if axis.size == 1:
            raise PlanError(
                "weights=sharded takes at least 2 ranks, but the plan has 1: use weights=hosted or weights=whole"
            )
        super().__init__(axis, device)
        self._ends: list[int] = []  # of the shards in each rank's segment
        self._shards: list[Tensor] = []
        self._segment: HostSegment | None = None  # with all shards, on a CPU
        self._pages = pages
        self._segments: Sequence[Tensor] | None = None  # of all ranks, if they can be mapped
        self._in_files: dict[int, Sequence[Tensor]] = {}  # the tensors of blocks that are not copied
        self._in_parts: dict[int, BlockInParts] = {}  # what other blocks are in memory that is mapped

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank keeps, beside those in files."""
        return sum(x.numel() for index, x in enumerate(self._shards) if index not in self._in_files)

    def reserve(self, blocks: Sequence[PackedBlock]) -> None:
        """See BlockStore."""
        self._blocks = blocks
        self._ends = list(accumulate(block.shard_bytes(self.axis.size) for block in blocks))
        if self.device.type == "cpu":
            self._segment, self._pages = HostSegment(self._ends[-1] if blocks else 0), self._pages or FilePages()

    def keep(self, index: int, copy: CopyMemory) -> None:
        """See BlockStore: of a block in files only `join` knows whether it has to be copied."""
        self._shards.append(self._new_shard(index))
        if self._segment is not None and self._pages is not None and self._blocks[index].is_in(self._pages):
            self._in_files[index] = self._blocks[index].tensors_now()
        else:
            self._write(index, copy)

    def _new_shard(self, index: int) -> Tensor:
        size = self._blocks[index].shard_bytes(self.axis.size)
        if self._segment is None:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._segment.memory.narrow(0, self._ends[index] - size, size)

    def _write(self, index: int, copy: CopyMemory) -> None:
        shard = self._shards[index]
        if self._segment is not None:
            self._segment.populate(shard)
        self._blocks[index].write(shard, self.axis.rank * shard.numel(), copy)

    def join(self, comm: Communicator) -> None:
        """See BlockStore."""
        super().join(comm)
        if self._segment is None:
            return
        if uses_host_memory(comm.transport):
            register_memory(comm.transport, self._segment.descriptor, self._segment.memory)
            with torch.inference_mode(mode=False):  # weights may be trained in it, or be written to by their network
                self._segments = segments_of_all(self._segment, (comm, self.axis), own_writes=True)
            if self._segments is not None:
                unregister_memory(comm.transport, self._segment.memory)
        self._segment.forget()
        in_files = " ".join(map(str, self._in_files))
        if self._segments is None or not is_alike((comm, self.axis), "blocks in files", in_files):
            with moved_by_all((comm, self.axis)):  # none reads a shard that has not been written
                for index in self._in_files:
                    self._write(index, copy_memory)
            self._in_files = {}

    def bring(self, index: int, slot: Tensor) -> Callable[[], Transfer]:
        """See BlockStore: one gather of `slot` [bytes] from all ranks."""
        block = self._blocks[index]
        where, into = f"weights of {block.name}", slot[: self.rows(block)]
        known = known_gather(self.axis, KIND, where, self._shards[index], into)
        if self._segments is None:
            return partial(self._gather, known)
        copies = [] if index in self._in_files else self._block_in_parts(index, slot).copies
        return partial(self._gather, KnownRead(known.booked, where, known.ranks, tuple(copies)))

    def placed(self, index: int, slot: Tensor) -> PlacedBlock:
        """See BlockStore: in files, or in shards that can be mapped, and few in `slot` [bytes]; else all there."""
        block = self._blocks[index]
        if index in self._in_files:
            return PlacedBlock(block, self._in_files[index], slot[:0])
        if self._segments is None:
            return super().placed(index, slot)
        found = self._block_in_parts(index, slot)
        return PlacedBlock(block, found.views, found.used)

    def _block_in_parts(self, index: int, slot: Tensor) -> BlockInParts:
        if index not in self._in_parts:
            assert self._segments is not None
            size = self._shards[index].numel()
            parts = [memory.narrow(0, self._ends[index] - size, size) for memory in self._segments]
            self._in_parts[index] = BlockInParts(self._blocks[index], parts, slot)
        return self._in_parts[index]

    def _gather(self, known: KnownGather | KnownRead) -> Transfer:
        assert self.comm is not None, "join comes before the first block runs"
        return self.comm.repeat(known)

    def whole(self, index: int, views: Sequence[Tensor]) -> Sequence[Tensor]:
        """See BlockStore: what is in files stays there."""
        return views if index in self._in_files else super().whole(index, views)

    def close(self) -> None:
        """See BlockStore."""
        if self._segment is not None and self.comm is not None:
            unregister_memory(self.comm.transport, self._segment.memory)
        self._shards, self._segment, self._pages, self._segments = [], None, None, None
        self._in_files, self._in_parts = {}, {}
