"""Small messages for the next step, several in one."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport import Work
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.errors import ExchangeError

MOST_MEMORIES = 1024  # of buckets: where exchange points come in another order in every step, no bucket returns
BucketMemories = dict[tuple[int, ...], MessageMemory]
"""Memory of buckets by the ids of the exchange points in them."""


class Sender(Protocol):
    """An exchange point. `own`: the value that it keeps of what it sends, of any shape."""

    own: Tensor | None


class MessageBucket:
    """Collects small messages and sends `size` of them as one. All ranks add parts in the same order.

    Where the exchange points of a bucket are those of one before, it is sent from and received into the same memory:
    each of them has read its values by then, before it added what it sends.
    """

    def __init__(self, comm: Communicator, size: int) -> None:
        self._comm, self._size = comm, size
        self._parts: list[ExchangePart] = []
        self._tickets: list[_Ticket] = []
        self.memories: BucketMemories = {}
        """Those of the guidance call that runs."""

    def put(self, part: ExchangePart, where: str, entry: Sender) -> Callable[[], Received]:
        """Add a part; return a function that waits for its received values. Its tensors must not change afterwards.

        `entry`: the exchange point that adds it, which has read its stale values. Its own value, if it is sent, becomes
        the copy in the message.
        """
        ticket = _Ticket(len(self._parts), where, entry)
        self._parts.append(part)
        self._tickets.append(ticket)
        if len(self._parts) >= self._size:
            self.flush(where)
        return ticket.wait

    def empty(self) -> None:
        """Discard the collected parts."""
        self._parts, self._tickets = [], []

    def flush(self, where: str) -> None:
        """Send the collected parts."""
        if not self._parts:
            return
        entries = [ticket.entry for ticket in self._tickets]
        if len(self.memories) >= MOST_MEMORIES:
            self.memories.clear()
        memory = self.memories.setdefault(tuple(map(id, entries)), MessageMemory())
        exchange = self._comm.exchange(where, self._parts, label="bucket", bulk=True, memory=memory)
        for ticket in self._tickets:
            ticket.exchange = exchange
        for entry in entries:
            entry.own = None if entry.own is None else memory.sent(entry.own)
        self.empty()


class _Ticket:
    def __init__(self, index: int, where: str, entry: Sender) -> None:
        self.index, self.where, self.entry, self.exchange = index, where, entry, None

    exchange: Work[list[Received]] | None

    def wait(self) -> Received:
        assert self.exchange is not None, "a bucket is flushed before the call that filled it ends"
        try:
            return self.exchange.wait()[self.index]
        except ExchangeError as error:  # it names the exchange point that filled the bucket
            raise ExchangeError(f"{self.where} waits for stale values: {error}") from error
