"""Hosted weights: the bytes of blocks in the memory of the host, copied to a slot of the device when a block runs.

    host memory      | rank 0 | rank 1 | rank 2 |      of a block; each rank has written its part, all map the others'
    device           slot 0, slot 1: a block is copied from all parts, the next one while this one computes

Ranks of one host copy whole blocks and send each other nothing. Between hosts a rank copies its part and gathers the
others'. One device has one part.

As Superpipeline (2410.08791) and the group offloading of diffusers do for one device.
"""

import json
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, AxisComm, Communicator
from patchpar.comm.known_exchange import KnownGather, known_gather
from patchpar.errors import PlanError
from patchpar.launch.accelerators import is_accelerator, pin_host_memory, unpin_host_memory
from patchpar.launch.host_memory import free_memory
from patchpar.launch.rendezvous import this_host
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.mesh import Axis
from patchpar.plan.replay.tape import COPIED
from patchpar.shard.verification import uncounted
from patchpar.shard.weights.copy_stream import CopyStream
from patchpar.shard.weights.host_segment import HostSegment, segments_of_all
from patchpar.shard.weights.packed import CopyMemory, PackedBlock
from patchpar.shard.weights.stores import KIND, BlockStore, Transfer

log = logging.getLogger(__name__)


def refuse_without_host_memory(num_bytes: int, mesh: AxisComm | None = None) -> None:
    """Raise PlanError if so many bytes of host memory, of this rank's part of weights, are not free.

    `mesh`: all ranks that keep parts, of whose sum on each host all ranks raise then, so that none waits for another.
    Collective with it. Raises ExchangeError.
    """
    own: list[Any] = [this_host(), num_bytes, free_memory()]
    found = [own]
    if mesh is not None:
        with uncounted(mesh[0]):
            gather = AllGather(*mesh, "verify", "free host memory")
            found = [json.loads(each) for each in gather.of_bytes(json.dumps(own).encode())]
    for host in dict.fromkeys(host for host, _, _ in found):
        need = sum(size for name, size, _ in found if name == host)
        free = min((each for name, _, each in found if name == host and each is not None), default=None)
        if free is not None and need > free:
            raise PlanError(
                f"weights=hosted keeps {readable_bytes(need)} of weights in host memory here, of which "
                f"{readable_bytes(free)} are free: load the model in a smaller dtype, use weights=sharded on more "
                "devices, or free some memory"
            )


def unpin_after_copies(stream: CopyStream, addresses: Sequence[int]) -> None:
    """Unpin memory of the host that is unmapped next, once copies from it are done.

    What stays pinned is taken by the driver for other memory that is mapped there later.
    """
    if addresses:
        stream.finish()
    for address in addresses:
        unpin_host_memory(address)


class HostStore(BlockStore):
    """Parts of blocks in host memory, pinned where the device's driver does that."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        super().__init__(axis, device)
        self._offsets: list[int] = []  # of the blocks in each rank's segment
        self._own: HostSegment | None = None
        self._segments: Sequence[Tensor] | None = None  # of all ranks, if this one has mapped them
        self._unpin: Any = None  # what undoes that, also when this store is dropped
        self._stream = CopyStream(device)

    @property
    def is_collective(self) -> bool:
        """See BlockStore: not where the ranks have mapped each other's memory."""
        return self._segments is None

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank keeps, in host memory."""
        return 0 if self._own is None else self._own.memory.numel()

    def reserve(self, blocks: Sequence[PackedBlock]) -> None:
        """See BlockStore; `refuse_without_host_memory` comes before it."""
        self._blocks, total = blocks, 0
        for block in blocks:
            self._offsets.append(total)
            total += block.shard_bytes(self.axis.size)
        self._own = HostSegment(total)

    def keep(self, index: int, copy: CopyMemory) -> None:
        """See BlockStore."""
        assert self._own is not None, "reserve comes first"
        block = self._blocks[index]
        part = self._part(self._own.memory, index)
        self._own.populate(part)
        block.write(part, self.axis.rank * block.shard_bytes(self.axis.size), copy)

    def join(self, comm: Communicator) -> None:
        """See BlockStore: map the memory of the other ranks, where all are on this host."""
        assert self._own is not None, "reserve comes first"
        super().join(comm)
        self._segments = segments_of_all(self._own, (comm, self.axis))
        used = [self._own.memory] if self._segments is None else self._segments
        pinned = [x.data_ptr() for x in used if pin_host_memory(x, self.device)]
        self._unpin = weakref.finalize(self, unpin_after_copies, self._stream, pinned)
        self._unpin.atexit = False
        if len(pinned) < len(used) and is_accelerator(str(self.device)):
            log.warning("host memory cannot be pinned for %s, so that copies of weights do not overlap", self.device)

    def bring(self, index: int, slot: Tensor) -> Callable[[], Transfer]:
        """See BlockStore: copies into `slot` [bytes], and a gather of it where ranks are on several hosts."""
        assert self._own is not None
        block = self._blocks[index]
        where, into = f"weights of {block.name}", slot[: self.rows(block)]
        if self._segments is None:
            known = known_gather(self.axis, KIND, where, self.row(block, slot), into)
            return partial(self._copy_and_gather, self._part(self._own.memory, index), known)
        parts = [self._part(memory, index) for memory in self._segments]
        pairs = list(zip(into.chunk(self.axis.size), parts, strict=True))
        return partial(self._copy, where, pairs, into.numel())

    def _copy_and_gather(self, part: Tensor, known: KnownGather) -> Transfer:
        comm = self._counted(part.numel())
        with self._stream.beside():
            known.own.copy_(part, non_blocking=True)
            return comm.repeat(known)

    def _copy(self, where: str, pairs: Sequence[tuple[Tensor, Tensor]], num_bytes: int) -> Transfer:
        self._counted(num_bytes).beat(where)
        return self._stream.copy(pairs)

    def _counted(self, num_bytes: int) -> Communicator:
        """Return the way to the other ranks, with so many bytes from the host in its statistics."""
        assert self.comm is not None, "join comes before the first block runs"
        traffic = self.comm.traffic
        traffic.rounds[COPIED] += 1
        traffic.bytes_received[COPIED] += num_bytes
        return self.comm

    def close(self) -> None:
        """See BlockStore."""
        if self._unpin is not None:
            self._unpin()
        self._segments, self._own = None, None

    def _part(self, memory: Tensor, index: int) -> Tensor:
        """Return the part [bytes] of a block in a rank's segment [bytes]."""
        return memory.narrow(0, self._offsets[index], self._blocks[index].shard_bytes(self.axis.size))
