"""Messages of torch.distributed in flight, in flat buffers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport.message import Incoming, T, Work
from patchpar.comm.transport.packing import layout_of, offset_of
from patchpar.comm.transport.stream_waits import StreamWaits
from patchpar.errors import ExchangeError


class Waiter(Protocol):
    """The transport that a work belongs to. `deadline`: seconds of one wait."""

    rank: int
    device: torch.device
    deadline: float
    waiting: AbstractContextManager[None]
    waits: StreamWaits | None

    @property
    def is_poisoned(self) -> bool:
        """Whether `check` would raise."""

    @property
    def is_captured(self) -> bool:
        """Whether a graph is captured now, in which nothing is sent."""

    def check(self, where: str) -> None:
        """Raise ExchangeError if an exchange before has failed."""

    def poison(self, reason: str) -> None:
        """Refuse every exchange from now on."""


class TorchWork(Work[T]):
    """Works in flight with their tensors: dropping the handle of a gloo send would block the receiver.

    `buffers`: those sent, kept until the wait, and one [elements] for each message received.
    """

    _has_messages = True

    def __init__(
        self,
        transport: Waiter,
        works: Sequence[dist.Work],
        buffers: tuple[Sequence[Tensor], Sequence[Tensor]],
        incoming: Sequence[Incoming],
        where: str,
    ) -> None:
        # What the base sets, too, without a call of it in every exchange.
        self.incoming, self.where, self._transport, self._works = incoming, where, transport, works
        self._sent, self._raw = buffers
        if self._has_messages:
            self._received = [None] * len(incoming)

    def _receive(self, index: int) -> list[Tensor]:
        """Receive one message into its buffers. Works may be coalesced, so this waits for the whole batch."""
        self._leave()
        message, device = self.incoming[index], self._transport.device
        into = message.into or [None] * len(message.specs)
        found = layout_of(message.specs).views(self._raw[index])
        return [_into(own, x) if own is not None else x.to(device) for own, x in zip(into, found, strict=True)]

    def _leave(self) -> None:
        """Wait for the batch, both ways."""
        if not self._works:
            return
        transport = self._transport
        if transport.is_poisoned:
            transport.check(self.where)
        incoming = _without_buffers(self.incoming) if self._has_messages else self.incoming
        missing = partial(_missing, transport.rank, self.where, incoming)
        try:
            if transport.waits is not None:
                stall = transport.waits.wait_for(self._works, missing)
                self._stalls = () if stall is None else (stall,)
            else:
                self._block(timedelta(seconds=transport.deadline))
        except RuntimeError as error:
            if transport.is_captured:
                raise
            text = f"{missing()} within {transport.deadline:g} s ({error})"
            transport.poison(text)
            raise ExchangeError(text) from error
        self._works = self._sent = ()

    def _block(self, deadline: timedelta) -> None:
        """Let the process wait."""
        with self._transport.waiting:
            for work in self._works:
                work.wait(deadline)


class FilledBuffer(TorchWork[Tensor]):
    """Works in flight that fill one buffer, of any shape: the result of `wait`. Its messages are not told apart."""

    _has_messages = False
    _joined: "FilledBuffer | None" = None

    def beside(self, other: Work[Any]) -> Work[Tensor]:
        """See Work. A stream waits for both between two events, and not between two for each."""
        if not isinstance(other, FilledBuffer) or other._transport is not self._transport:
            return super().beside(other)
        self._works, self._sent = (*other._works, *self._works), (*other._sent, *self._sent)
        self.incoming = (*other.incoming, *self.incoming)
        other._works, other._sent, other._joined = (), (), self
        return self

    def _finish(self) -> Tensor:
        if self._joined is None:
            self._leave()
        else:
            self._joined.wait()
        return self._raw[0]


def _into(own: Tensor, x: Tensor) -> Tensor:
    """Return `own` with the values of `x`, of the same shape; the backend may have written them there already."""
    return own if offset_of(own) == offset_of(x) else own.copy_(x)


def _without_buffers(incoming: Sequence[Incoming]) -> Sequence[Incoming]:
    """Return the messages without buffers: whoever names them later must not keep what has been received."""
    for message in incoming:
        if message.into is not None:
            return [Incoming(each.peer, each.specs) for each in incoming]
    return incoming


def _missing(rank: int, where: str, incoming: Sequence[Incoming]) -> str:
    if not incoming:
        return f"rank {rank} at {where}: the other ranks have not taken part in the exchange"
    peers = sorted({message.peer for message in incoming})
    shapes = [spec.shape for message in incoming for spec in message.specs]
    return f"rank {rank} at {where}: no message from ranks {peers} of shapes {shapes}"
