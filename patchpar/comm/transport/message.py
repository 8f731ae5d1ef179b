"""What a transport carries: outgoing and incoming messages, and the promise of their arrival."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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


class Work(Protocol):
    """Messages on their way. Somebody holds it until `wait` has returned: dropping it may cancel the transfer."""

    def is_here(self, index: int) -> bool:
        """Whether `wait_for(index)` is known to return, or to raise, at once."""

    def wait_for(self, index: int) -> list[Tensor]:
        """Block until the `index`-th incoming message is here and return its tensors. Raises ExchangeError."""

    def wait(self) -> list[list[Tensor]]:
        """Block until all incoming messages are here and ours have left. Raises ExchangeError.

        On a GPU that may be its stream, and not the process.
        """

    def stalls(self) -> Sequence[Stall]:
        """What a stream waits for that the process has not; each told once."""


class Transport(Protocol):
    """One rank's way to the others."""

    rank: int
    device: torch.device
    deadline: float  # seconds that one wait may take; the engine raises it for slow models
    waiting: AbstractContextManager[None]  # entered while the process does nothing but wait for another rank

    def swap(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> Work:
        """Start sending and receiving; `where` names the seam in errors. Returns at once."""

    def close(self) -> None:
        """Let go of sockets and memory. Idempotent."""
