"""An exchange that is repeated in every step, with the same messages in the same buffers: nothing is planned again.

KnownGather      one tensor of each rank
KnownRead        the same where all tensors lie in memory that this rank maps, so that none is sent
MessagePlan      where the tensors of messages to and from each rank lie, in one buffer that is sent and one received
KnownExchange    the exchange in buffers of its own, as one operation of all ranks of an axis
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchpar.comm.layouts import gather_layout
from patchpar.comm.traffic import Booked
from patchpar.comm.transport import Collectives, FlatParts, Incoming, Outgoing, TensorSpec, Transport, Work
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.comm.transport.packing import ALIGNMENT, MOST_PADDING, layout_of, offset_of, row_of
from patchpar.plan.mesh import Axis

Specs = tuple[TensorSpec, ...]


class KnownGather(NamedTuple):
    """A gather of `own` [N] of all ranks into `into` [P * N], each time of these tensors.

    `booked`: kind, bytes sent and bytes received. `own_row`: where own values go, [N]; None where they are. Messages
    have buffers, `incoming` of one operation none.
    """

    booked: Booked
    where: str
    ranks: tuple[int, ...]
    own: Tensor
    into: Tensor
    own_row: Tensor | None
    incoming: tuple[Incoming, ...]
    messages: tuple[tuple[Outgoing, ...], tuple[Incoming, ...]]

    def begin(self, transport: Transport, collectives: Collectives | None) -> Work[Any]:
        """Start it: by one operation, which puts own values in their place too, or by messages."""
        if collectives is not None:
            return collectives.all_gather(self.ranks, self.own, self.into, self.incoming, self.where, bulk=True)
        pending = transport.send_recv(*self.messages, self.where)
        if self.own_row is not None:
            self.own_row.copy_(self.own)
        return pending


def known_gather(axis: Axis, kind: str, where: str, own: Tensor, into: Tensor) -> KnownGather:
    """Return the gather of `own` [N] of all ranks of the axis into `into` [P * N], both contiguous, for `where`."""
    layout, rows = gather_layout(axis, tuple(own.shape), own.dtype), into.view(axis.size, -1)
    own_row = None if offset_of(rows[axis.rank]) == offset_of(own) else rows[axis.rank]
    incoming = (each._replace(into=(rows[other],)) for each, other in zip(layout.incoming, axis.others, strict=True))
    messages = (Outgoing(axis.other_ranks, (own,)),), tuple(incoming)
    booked = (kind, layout.num_bytes, layout.num_bytes)
    return KnownGather(booked, where, axis.ranks, own, into, own_row, layout.incoming, messages)


class KnownRead(NamedTuple):
    """A gather of values of all ranks that this one can read, and that do not change. `booked`: as if they were sent.

    `copies`: pairs of memory to write to and to read, of any shape; what is used where it lies is in none.
    """

    booked: Booked
    where: str
    ranks: tuple[int, ...]
    copies: tuple[tuple[Tensor, Tensor], ...]

    def begin(self, transport: Transport, collectives: Collectives | None) -> Work[Any]:
        """Return what copies when it is waited for, right before the values are used. Raises ExchangeError."""
        transport.check(self.where)
        return ReadWork(self.copies, self.where)


class ReadWork(Work[None]):
    """Values, of any shape, that are copied when they are waited for: `copies` of a KnownRead."""

    def __init__(self, copies: Sequence[tuple[Tensor, Tensor]], where: str) -> None:
        super().__init__((), where)
        self._copies = copies

    def _finish(self) -> None:
        for into, x in self._copies:
            into.copy_(x)

    def _receive(self, index: int) -> list[Tensor]:
        raise IndexError(f"{self.where}: no message {index}")


class KnownExchange(NamedTuple):
    """An exchange of the messages in `sent`, which their owner writes before each start, and of those in `received`.

    `rows`: the received buffer as [P, bytes], where all ranks get the same message. `tensors`: views of what was
    received, of any shape, by sender; none where it is received into a buffer of the caller's. `booked`: kind, bytes
    sent and bytes received.
    """

    where: str
    ranks: tuple[int, ...]
    sent: FlatParts
    received: FlatParts
    rows: Tensor | None
    incoming: tuple[Incoming, ...]
    tensors: Mapping[int, list[Tensor]]
    booked: Booked

    def begin(self, transport: Transport, collectives: Collectives | None) -> Work[Any]:
        """Start it. Raises ExchangeError."""
        assert collectives is not None, "known exchanges are of transports with collectives"
        if self.rows is not None:
            own, rows = self.sent.buffer, self.rows
            return collectives.all_gather(self.ranks, own, rows, self.incoming, self.where, bulk=True)
        return collectives.all_to_all(self.ranks, self.sent, self.received, self.incoming, self.where, bulk=True)


class MessagePlan:
    """Messages of tensors of these specs: `sent` to each global rank of an axis, and `received` from each.

    `to_all`: every rank sends the same to all others, so that it may be a gather. `offsets`: in the buffer that is
    sent, the first byte of each tensor of the message to a rank.
    """

    def __init__(
        self, axis: Axis, sent: Mapping[int, Specs], received: Mapping[int, Specs], *, to_all: bool = False
    ) -> None:
        self._axis, self._received = axis, received
        self._booked = _bytes_of(sent), _bytes_of(received)
        self._row = _gathered_bytes(sent, received) if to_all else None
        if self._row is None:
            row = row_of(tuple(sent.get(rank, ()) for rank in axis.ranks))
            self._sizes, starts = row.sizes, dict(zip(axis.ranks, row.starts, strict=True))
        else:
            self._sizes, starts = [self._row], dict.fromkeys(axis.ranks, 0)
        self.offsets = {rank: _offsets(specs, starts[rank]) for rank, specs in sent.items()}

    def known(
        self, kind: str, where: str, memory: MessageMemory, device: torch.device, whole: Tensor | None = None
    ) -> KnownExchange:
        """Return the exchange of `kind` at `where` in buffers of `memory`.

        `whole`: a contiguous buffer, of any shape, that is received into if it is as large as all messages.
        """
        ranks, rows = self._axis.ranks, None
        row = row_of(tuple(self._received.get(rank, ()) for rank in ranks))
        sizes = row.sizes if self._row is None else [self._row] * len(ranks)
        if whole is not None and self._row is None and whole.nbytes == row.size:
            buffer, views = whole.view(-1).view(torch.uint8), False
        else:
            buffer, views = memory.take("received", sum(sizes), torch.uint8, device), True
        if self._row is not None:
            rows = buffer.view(len(ranks), self._row)
        parts = dict(zip(ranks, buffer.split_with_sizes(sizes), strict=True))
        sent = FlatParts(memory.take("sent", sum(self._sizes), torch.uint8, device), self._sizes)
        incoming = tuple(Incoming(rank, specs) for rank, specs in self._received.items())
        tensors = {rank: _tensors(specs, parts[rank]) for rank, specs in self._received.items() if views}
        booked = (kind, *self._booked)
        return KnownExchange(where, ranks, sent, FlatParts(buffer, sizes), rows, incoming, tensors, booked)


def _bytes_of(messages: Mapping[int, Specs]) -> int:
    return sum(spec.num_bytes for specs in messages.values() for spec in specs)


def _gathered_bytes(sent: Mapping[int, Specs], received: Mapping[int, Specs]) -> int | None:
    """Return the bytes of a row, as long as the longest message; None where rows would be much more than messages.

    All ranks find the same.
    """
    if not sent:
        return None
    messages = [next(iter(sent.values())), *received.values()]
    sizes = [layout.size * layout.dtype.itemsize for layout in map(layout_of, messages)]
    width = -(-max(sizes) // ALIGNMENT) * ALIGNMENT
    return None if width * len(sizes) > MOST_PADDING * sum(sizes) else width


def _offsets(specs: Specs, start: int) -> tuple[int, ...]:
    layout = layout_of(specs)
    return tuple(start + offset * layout.dtype.itemsize for offset in layout.offsets)


def _tensors(specs: Specs, part: Tensor) -> list[Tensor]:
    """Return the tensors of a message, of any shape: views of `part` [bytes]."""
    layout = layout_of(specs)
    return layout.views(part.narrow(0, 0, layout.size * layout.dtype.itemsize).view(layout.dtype))


Known = KnownGather | KnownRead | KnownExchange
