"""Where the bytes of a network's blocks lie while they are in no slot: a part on each rank, and the way to a slot."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm, Communicator
from patchpar.errors import ExchangeError, PlanError, UnsupportedModel
from patchpar.launch.accelerators import free_bytes
from patchpar.launch.remote_errors import say_changes_left
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.mesh import Axis
from patchpar.shard.verification import every_rank_has
from patchpar.shard.weights.packed import CopyMemory, PackedBlock
from patchpar.shard.weights.placed import PlacedBlock

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

    def placed(self, index: int, slot: Tensor) -> PlacedBlock:
        """Return where a block's parameters are while it is in `slot` [bytes]: before `join` all of them there."""
        block = self._blocks[index]
        return PlacedBlock(block, block.views(slot), slot[: self.rows(block)])

    def whole(self, index: int, views: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return memory that a block's parameters use when it stays whole, with the values of `views`, of any shape."""
        return self._blocks[index].own_copies(views)

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
