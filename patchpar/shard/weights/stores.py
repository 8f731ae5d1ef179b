"""Where the bytes of a network's blocks lie while they are in no slot: a part on each rank, and the way to a slot."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm, Communicator
from patchpar.comm.known_exchange import KnownGather, KnownRead, known_gather
from patchpar.comm.transport import register_memory, shares_memory, unregister_memory
from patchpar.errors import ExchangeError, PlanError, UnsupportedModel
from patchpar.launch.accelerators import free_bytes
from patchpar.launch.remote_errors import say_changes_left
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.mesh import Axis
from patchpar.shard.verification import every_rank_has
from patchpar.shard.weights.host_segment import HostSegment, segments_of_all
from patchpar.shard.weights.in_place import BlockInParts
from patchpar.shard.weights.packed import CopyMemory, PackedBlock

KIND = "weights"  # of all gathers, in statistics


def refuse_whole(mesh: AxisComm, kind: str, num_bytes: int) -> None:
    """Raise PlanError, on all ranks of the axis, unless so many more bytes are free on the device of each.

    They are of whole blocks of a network of the class `kind`. Collective. Raises ExchangeError.
    """
    device = mesh[0].transport.device
    free = free_bytes(device)
    if not every_rank_has(mesh, "memory for whole weights", free is None or num_bytes <= free):
        have = "unknown" if free is None else readable_bytes(free)
        raise PlanError(
            f"the blocks of {kind} take {readable_bytes(num_bytes)} when they are whole, more than is free on a "
            f"device ({device} has {have}): call methods that need whole weights on diffusers' own pipeline "
            "before it is made parallel, load the model in a smaller dtype, or close the pipeline"
        )


@contextmanager
def moved_by_all(mesh: AxisComm) -> Iterator[None]:
    """Context in which each rank of the axis moves blocks into shards by itself. Collective.

    Where one fails, it raises its own exception and the others ExchangeError, so that none waits for it. What has moved
    is lost then, and the ranks have to be started anew; not where a model is refused, before anything moves.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:  # noqa: BLE001  whatever it is, the others are told
        error = found
    try:
        if every_rank_has(mesh, "blocks in shards", error is None):
            return
    except ExchangeError as found:
        error = error or found
    if not isinstance(error, (UnsupportedModel, PlanError)):
        error = error or ExchangeError("another rank has failed while its blocks moved into shards")
        say_changes_left(error)
    raise error


class Transfer(Protocol):
    """A block on its way into a slot."""

    def wait(self) -> object:
        """Block until it is there; on a GPU the stream may wait instead. Raises ExchangeError."""


class BlockStore(ABC):
    """The bytes of a network's blocks that this rank of `axis` keeps, beside the slots on `device`.

    `reserve` and `keep` work on this rank alone; `join` and, where `is_collective`, what `bring` returns are called on
    all ranks.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self.comm: Communicator | None = None
        self._blocks: Sequence[PackedBlock] = ()  # from `reserve` on

    @property
    @abstractmethod
    def is_collective(self) -> bool:
        """Whether all ranks of the axis have to take part when a block is brought into a slot."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that this rank keeps."""

    def join(self, comm: Communicator) -> None:
        """Connect with the stores of the other ranks. Collective. Raises ExchangeError."""
        self.comm = comm

    @abstractmethod
    def reserve(self, blocks: Sequence[PackedBlock]) -> None:
        """Prepare to keep a part of these blocks."""

    @abstractmethod
    def keep(self, index: int, copy: CopyMemory) -> None:
        """Copy this rank's part of a block, before its parameters are views of a slot."""

    @abstractmethod
    def bring(self, index: int, slot: Tensor) -> Callable[[], Transfer]:
        """Return what starts to bring a block into `slot` [bytes], whenever it is called. After `join`.

        All that can be computed beforehand is: it runs in every block, and on a GPU takes time of the host.
        """

    def views(self, index: int, slot: Tensor) -> list[Tensor]:
        """Return tensors like a block's, of any shape, where they are while it is in `slot` [bytes]. After `join`.

        All of them in the slot, unless a store overrides it.
        """
        return self._blocks[index].views(slot)

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Idempotent."""

    def refuse_whole(self, kind: str, num_bytes: int) -> None:
        """Raise PlanError unless so many bytes, of whole blocks of a network of that class, are free on every device.

        Collective, after `join`. Raises ExchangeError.
        """
        assert self.comm is not None, "join comes first"
        refuse_whole((self.comm, self.axis), kind, num_bytes)

    def rows(self, block: PackedBlock) -> int:
        """Return the bytes of all ranks' parts of a block, with what fills the last of them."""
        return self.axis.size * block.shard_bytes(self.axis.size)

    def row(self, block: PackedBlock, slot: Tensor) -> Tensor:
        """Return where this rank's part of a block lies in `slot` [bytes], as [bytes]."""
        size = block.shard_bytes(self.axis.size)
        return slot.narrow(0, self.axis.rank * size, size)


class DeviceShards(BlockStore):
    """Shards in the memory of the device, which are gathered from all ranks of the axis. Raises PlanError for one.

    On CPUs of one host the other ranks map them, and use in place what does not lie in several shards.
    """

    is_collective = True

    def __init__(self, axis: Axis, device: torch.device) -> None:
        if axis.size == 1:
            raise PlanError(
                "weights=sharded takes at least 2 ranks, but the plan has 1: use weights=hosted or weights=whole"
            )
        super().__init__(axis, device)
        self._shards: list[Tensor] = []
        self._segment: HostSegment | None = None  # with all shards, on a CPU
        self._free: Tensor | None = None  # the rest of it
        self._segments: Sequence[Tensor] | None = None  # of all ranks, if they can be mapped

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank keeps."""
        return sum(x.numel() for x in self._shards)

    def reserve(self, blocks: Sequence[PackedBlock]) -> None:
        """See BlockStore."""
        self._blocks = blocks
        if self.device.type == "cpu":
            self._segment = HostSegment(sum(block.shard_bytes(self.axis.size) for block in blocks))
            self._free = self._segment.memory

    def keep(self, index: int, copy: CopyMemory) -> None:
        """See BlockStore."""
        size = self._blocks[index].shard_bytes(self.axis.size)
        if self._free is None:
            shard = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            shard, self._free = self._free[:size], self._free[size:]
        self._blocks[index].write(shard, self.axis.rank * size, copy)
        self._shards.append(shard)

    def join(self, comm: Communicator) -> None:
        """See BlockStore."""
        super().join(comm)
        if self._segment is not None and shares_memory(comm.transport):
            register_memory(comm.transport, self._segment.descriptor, self._segment.memory)
            with torch.inference_mode(mode=False):  # weights may be trained in it, or be written to by their network
                self._segments = segments_of_all(self._segment, (comm, self.axis), own_writes=True)
            if self._segments is not None:
                unregister_memory(comm.transport, self._segment.memory)
        if self._segment is not None:
            self._segment.forget()

    def bring(self, index: int, slot: Tensor) -> Callable[[], Transfer]:
        """See BlockStore: one gather of `slot` [bytes] from all ranks."""
        block = self._blocks[index]
        where, into = f"weights of {block.name}", slot[: self.rows(block)]
        known = known_gather(self.axis, KIND, where, self._shards[index], into)
        if self._segments is None:
            return partial(self._gather, known)
        copies = BlockInParts(block, self._parts(index), slot).copies
        return partial(self._gather, KnownRead(known.booked, where, known.ranks, tuple(copies)))

    def views(self, index: int, slot: Tensor) -> list[Tensor]:
        """See BlockStore: in shards, of any shape, and in `slot` [bytes], where all shards can be mapped."""
        if self._segments is None:
            return super().views(index, slot)
        return BlockInParts(self._blocks[index], self._parts(index), slot).views

    def _parts(self, index: int) -> list[Tensor]:
        """Return the parts [bytes] of a block of all ranks, in memory that is mapped here."""
        assert self._segments is not None
        sizes = [block.shard_bytes(self.axis.size) for block in self._blocks[: index + 1]]
        return [memory.narrow(0, sum(sizes[:-1]), sizes[-1]) for memory in self._segments]

    def _gather(self, known: KnownGather | KnownRead) -> Transfer:
        assert self.comm is not None, "join comes before the first block runs"
        return self.comm.repeat(known)

    def close(self) -> None:
        """See BlockStore."""
        if self._segment is not None and self.comm is not None:
            unregister_memory(self.comm.transport, self._segment.memory)
        self._shards, self._segment, self._free, self._segments = [], None, None, None
