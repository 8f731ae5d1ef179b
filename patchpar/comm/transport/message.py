"""Messages of a transport, outgoing and incoming, and the handle of those in flight."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from patchpar.comm.transport.message_memory import MessageMemory

T = TypeVar("T")
U = TypeVar("U")
Messages = list[list[Tensor]]  # the tensors of each message


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor to receive: known beforehand, because all ranks have the same plan."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, x: Tensor) -> "TensorSpec":
        """Return the spec of `x`, of any shape."""
        return cls(tuple(x.shape), x.dtype)


class FlatParts(NamedTuple):
    """A contiguous buffer [elements] of parts that follow each other, of `sizes` elements, one for each rank.

    `alike`, of what is sent: the largest of the parts that a rank sends and receives is as large on all ranks.
    """

    buffer: Tensor
    sizes: Sequence[int]
    alike: bool = False

    def parts(self) -> list[Tensor]:
        """Return views of the parts, [elements] each."""
        return list(self.buffer.split_with_sizes(self.sizes))


class Outgoing(NamedTuple):
    """The same tensors to one or several ranks, as one message each."""

    peers: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes sent by this rank, counted once per receiver."""
        return len(self.peers) * sum(x.numel() * x.element_size() for x in self.tensors)


class Incoming(NamedTuple):
    """One message expected from one rank. `into`: buffers for the values; None allocates.

    Buffers are written when the message is waited for, not before, unless `at_once`: then nobody reads them until the
    wait, and on a GPU they may be written as soon as the stream gets to the exchange.
    """

    peer: int
    specs: tuple[TensorSpec, ...]
    into: tuple[Tensor | None, ...] | None = None
    at_once: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes received."""
        return sum(spec.num_bytes for spec in self.specs)


class Stall(Protocol):
    """A wait of a GPU's stream, which may last after `wait()` has returned to the process."""

    def seconds(self, *, block: bool) -> float | None:
        """Return its duration; None while it lasts, unless `block`, which synchronises."""


class Work(ABC, Generic[T]):
    """Messages in flight, as torch.distributed's Work: the only handle, from the transport to the caller.

    Keep it until `wait` has returned: dropping it may cancel the transfer. Each transport derives a class that receives
    its messages. `incoming`: the expected messages; `where`: the exchange point, for errors.
    """

    on_wait: Callable[[float, Sequence[Stall]], object] | None = None
    """Called after each wait with its start (time.perf_counter) and the stalls of streams."""
    _beside: tuple["Work[Any]", ...] = ()
    _result: tuple[T] | None = None
    _stalls: Sequence[Stall] = ()  # of streams, since the last call of `on_wait`
    _steps: tuple[Callable[[Any], Any], ...] = ()

    def __init__(self, incoming: Sequence[Incoming], where: str) -> None:
        self.incoming, self.where = incoming, where
        self._received: list[list[Tensor] | None] = [None] * len(incoming)

    def then(self, arrange: Callable[[T], U]) -> "Work[U]":
        """Apply `arrange` to the result of `wait` and return this handle: see torch.futures.Future."""
        self._steps = (*self._steps, arrange)
        return self  # type: ignore[return-value]  # `typing.cast` is a call, in every exchange

    def beside(self, other: "Work[Any]") -> "Work[T]":
        """Wait in `wait` for `other` too, at once where the transport can, and return this handle."""
        self._beside = (*self._beside, other)
        return self

    def wait_for(self, index: int) -> list[Tensor]:
        """Block until incoming message `index` has arrived; return its tensors, of any shape. Raises ExchangeError."""
        found = self._received[index]
        if found is None:
            start = time.perf_counter()
            found = self._received[index] = self._receive(index)
            self._report(start)
        return found

    def arriving(self) -> Iterator[list[Tensor]]:
        """Yield the tensors, of any shape, of each incoming message in order as it arrives. Raises ExchangeError."""
        return map(self.wait_for, range(len(self.incoming)))

    def wait(self) -> T:
        """Block until all incoming messages have arrived and all outgoing ones are sent. Idempotent.

        On a GPU the stream may wait instead of the process. Returns the tensors of each message in order, or the result
        of `then`. Raises ExchangeError.
        """
        if self._result is None:
            for other in self._beside:
                other.wait()
            start = time.perf_counter()
            result = self._finish()
            stalls, self._stalls = self._stalls, ()
            if self.on_wait is not None:  # as `_report`, without a call in every exchange
                self.on_wait(start, stalls)
            for arrange in self._steps:
                result = arrange(result)
            self._result = (result,)
        return self._result[0]

    def _finish(self) -> Any:
        """Wait for all messages, both ways, and return what `then` begins with. Raises ExchangeError."""
        for index, found in enumerate(self._received):
            if found is None:
                self._received[index] = self._receive(index)
        self._leave()
        return self._received

    @abstractmethod
    def _receive(self, index: int) -> list[Tensor]:
        """Wait for one message, in any order, once for each. Raises ExchangeError."""

    def _leave(self) -> None:
        """Wait until the outgoing messages are sent. Raises ExchangeError."""

    def _report(self, start: float) -> None:
        stalls, self._stalls = self._stalls, ()
        if self.on_wait is not None:
            self.on_wait(start, stalls)


class Arrived(Work[T]):
    """Values that are here already."""

    def __init__(self, values: T, where: str) -> None:
        super().__init__((), where)
        self._values, self._result = values, (values,)

    def then(self, arrange: Callable[[T], U]) -> "Work[U]":
        """See Work."""
        return Arrived(arrange(self._values), self.where)

    def _receive(self, index: int) -> list[Tensor]:
        raise IndexError(f"{self.where}: no message {index}")


@runtime_checkable
class StreamWaitingFlag(Protocol):
    """Where a rank says whether the stream of its GPU waits for another rank, while the process may do anything."""

    def set_stream_waiting(self, waits: bool) -> None:
        """Say whether it waits."""


class Transport(Protocol):
    """Sends and receives messages of one rank. `deadline`: limit of one wait in seconds, raised for slow models."""

    rank: int
    device: torch.device
    deadline: float
    waiting: AbstractContextManager[None]  # entered while the process only waits for another rank

    @property
    def collectives(self) -> "Collectives | None":
        """Operations of several ranks at once; None where there are messages only."""

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> Work[Messages]:
        """Start sending and receiving; `where` names the exchange point in errors. Returns at once."""

    def settle(self, where: str) -> None:
        """Block until the device has what it waits for. Raises ExchangeError if an exchange has failed unnoticed."""

    def poison(self, reason: str) -> None:
        """Refuse every exchange from now on, since messages may be left over: see `Poisonable`."""

    def check(self, where: str) -> None:
        """Raise ExchangeError at the exchange point `where` if this transport is poisoned."""

    def close(self) -> None:
        """Close sockets and release memory. Idempotent."""


class Collectives(Protocol):
    """Operations in which all of several ranks take part at once. `ranks`: their global ranks, ascending.

    `bulk`: what is not needed in this step; it does not hold up what is. Each returns at once.
    """

    def form(self, sets: Sequence[tuple[int, ...]], *, symmetric_memory: bool = False) -> None:
        """Prepare operations of these sets of ranks. All ranks of the job call it, with the same sets in order.

        `symmetric_memory`: small ones go through memory that the ranks share, where there is such.
        """

    def covers(self, ranks: tuple[int, ...]) -> bool:
        """Whether there are operations of `ranks`."""

    def all_gather(
        self,
        ranks: tuple[int, ...],
        own: Tensor,
        rows: Tensor,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Tensor]:
        """Start to gather `own` [...], contiguous and of the same size on all ranks, into `rows`, contiguous too.

        `rows` is [len(ranks), ...], or with as many dims as `own` and len(ranks) times its first. `incoming`: what
        comes of the other ranks, for errors. The result of the Work: `rows`.
        """

    def gather_messages(
        self,
        ranks: tuple[int, ...],
        own: Tensor,
        rows: Tensor,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Messages]:
        """As `all_gather` of [elements]. `incoming`: the messages of the others in their rows, see `packing`."""

    def all_to_all(
        self,
        ranks: tuple[int, ...],
        own: FlatParts,
        into: FlatParts,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Tensor]:
        """Start to send each rank its part of `own`, and to receive its part of `into` from each, this one's included.

        `incoming`: what comes of the other ranks, for errors. The result of the Work: the buffer of `into` [elements].
        """

    def exchange(
        self,
        ranks: tuple[int, ...],
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
        memory: MessageMemory | None = None,
    ) -> Work[Messages]:
        """Start an exchange of at most one message from each rank to each. Ranks without any take part as well.

        `memory`: has the buffers of an exchange that is repeated, if given.
        """
