"""What a transport carries: outgoing and incoming messages, and the handle of those on their way."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")
Messages = list[list[Tensor]]  # the tensors of each


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor on its way here: known beforehand, because all ranks share one plan."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, x: Tensor) -> "TensorSpec":
        """The spec of an existing tensor."""
        return cls(tuple(x.shape), x.dtype)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The same tensors to one or several ranks, as one message each."""

    peers: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that leave this rank, counted once per receiver."""
        return len(self.peers) * sum(x.numel() * x.element_size() for x in self.tensors)


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message expected from one rank. `into`: tensors that take the values; new ones do where None.

    Values are put there when the message is waited for, not before.
    """

    peer: int
    specs: tuple[TensorSpec, ...]
    into: tuple[Tensor | None, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that come in."""
        return sum(spec.num_bytes for spec in self.specs)


class Stall(Protocol):
    """A wait of a GPU's stream, which goes on after the process has been told that it may."""

    def seconds(self, *, block: bool) -> float | None:
        """How long it took; None while it lasts, unless to `block` until that is known."""


class Work(ABC, Generic[T]):
    """Messages on their way, as torch.distributed's Work: the only handle, from the transport to whoever waits.

    Somebody holds it until `wait` has returned: dropping it may cancel the transfer. A transport derives its own, and
    says there how one message is received. `incoming`: what is expected; `where`: the exchange point, for errors.
    """

    def __init__(self, incoming: Sequence[Incoming], where: str) -> None:
        self.incoming, self.where = incoming, where
        self.on_wait: Callable[[float, Sequence[Stall]], object] | None = None
        """Called after each wait that had to be: when it began (time.perf_counter), and what streams wait for."""
        self._received: list[list[Tensor] | None] = [None] * len(incoming)
        self._steps: list[Callable[[Any], Any]] = []
        self._result: tuple[T] | None = None

    def then(self, arrange: Callable[[T], U]) -> "Work[U]":
        """This same handle, whose `wait` returns what `arrange` makes of the result: see torch.futures.Future."""
        self._steps.append(arrange)
        return cast("Work[U]", self)

    def wait_for(self, index: int) -> list[Tensor]:
        """Block until the `index`-th incoming message is here and return its tensors. Raises ExchangeError."""
        found = self._received[index]
        if found is None:
            start = time.perf_counter()
            found = self._received[index] = self._receive(index)
            self._waited(start)
        return found

    def arriving(self) -> Iterator[list[Tensor]]:
        """The tensors of each incoming message in their order, each as soon as it is here. Raises ExchangeError."""
        return map(self.wait_for, range(len(self.incoming)))

    def wait(self) -> T:
        """Block until all incoming messages are here and ours have left. Raises ExchangeError. Idempotent.

        On a GPU that may be its stream, and not the process. Returns the tensors of each message in their order, or
        what `then` makes of them.
        """
        if self._result is None:
            start = time.perf_counter()
            for index, found in enumerate(self._received):
                if found is None:
                    self._received[index] = self._receive(index)
            self._leave()
            self._waited(start)
            result: Any = self._received
            for arrange in self._steps:
                result = arrange(result)
            self._result = (result,)
        return self._result[0]

    def _waited(self, start: float) -> None:
        if self.on_wait is not None:
            self.on_wait(start, self._stalls())

    @abstractmethod
    def is_here(self, index: int) -> bool:
        """Whether `wait_for(index)` is known to return, or to raise, at once."""

    @abstractmethod
    def _receive(self, index: int) -> list[Tensor]:
        """Wait for one message, in any order, each once. Raises ExchangeError."""

    def _leave(self) -> None:
        """Wait until ours have left. Raises ExchangeError."""

    def _stalls(self) -> Sequence[Stall]:
        """What a stream waits for that the process has not; each told once."""
        return ()


class Transport(Protocol):
    """One rank's way to the others."""

    rank: int
    device: torch.device
    deadline: float  # seconds that one wait may take; the engine raises it for slow models
    waiting: AbstractContextManager[None]  # entered while the process does nothing but wait for another rank

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> Work[Messages]:
        """Start sending and receiving; `where` names the exchange point in errors. Returns at once."""

    def close(self) -> None:
        """Let go of sockets and memory. Idempotent."""
