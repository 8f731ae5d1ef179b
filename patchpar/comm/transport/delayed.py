"""A simulated slower link: messages arrive no earlier than a given latency and rate allow.

For measuring strategies on a link that you do not have: two ranks of one host show what an exchange would cost over
Ethernet, and how much of it computation hides.

    send         |<- bytes / rate ->|<- latency ->|  stamp = time of arrival
    the next one                    |<- bytes / rate ->|<- latency ->|

Every rank has one outgoing link, which sends its messages one after the other; a message to several ranks is sent once
for each. The sender stamps each message with its time of arrival and the receiver sleeps until then. The clock is
CLOCK_MONOTONIC, which all processes of a host share: ranks of different hosts cannot use this.
"""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from patchpar.comm.transport.message import Incoming, Messages, Outgoing, TensorSpec, Transport, Work
from patchpar.errors import ExchangeError, PlanError

STAMP = TensorSpec((1,), torch.int64)  # nanoseconds of the monotonic clock; not counted as bytes of the message
NANO = 1_000_000_000


class DelayedTransport:
    """The transport `inner` over a link of `latency` seconds and `rate` bytes per second; infinity is no limit.

    `overtake`: messages of at most so many bytes do not queue behind larger ones, as on a link that serves several
    streams in turn; they still use its bandwidth. 0 is one queue. Either all ranks of a group wrap their transport or
    none. `latency`, `rate` and `overtake` may be changed between exchanges. Raises PlanError.
    """

    collectives = None  # every message has a time of arrival of its own

    def __init__(self, inner: Transport, *, latency: float = 0.0, rate: float = math.inf, overtake: int = 0) -> None:
        if not latency >= 0 or not rate > 0 or math.isinf(latency):
            raise PlanError(f"latency={latency!r} s, rate={rate!r} bytes/s: use a latency >= 0 and a rate > 0")
        self.inner, self.latency, self.rate, self.overtake = inner, latency, rate, overtake
        self.rank, self.device = inner.rank, inner.device
        self._link_free = self._lane_free = 0.0

    @property
    def deadline(self) -> float:
        """Limit of one wait in seconds."""
        return self.inner.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        self.inner.deadline = seconds

    @property
    def waiting(self) -> AbstractContextManager[None]:
        """Context manager entered while the process only waits for another rank."""
        return self.inner.waiting

    @waiting.setter
    def waiting(self, while_waiting: AbstractContextManager[None]) -> None:
        self.inner.waiting = while_waiting

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> "DelayedWork":
        """Start sending and receiving; `where` names the exchange point in errors. Returns at once."""
        stamped = [
            Outgoing((peer,), (self._stamp(message), *message.tensors))
            for message in outgoing
            for peer in message.peers
        ]
        expected = [_with_stamp(message) for message in incoming]
        return DelayedWork(self, self.inner.send_recv(stamped, expected, where), incoming, where)

    def _stamp(self, message: Outgoing) -> Tensor:
        """Return the time of arrival of one copy of `message`, and occupy the link until it has been sent."""
        num_bytes = message.num_bytes // len(message.peers)
        now, taken = time.monotonic(), num_bytes / self.rate
        self._link_free = left = max(now, self._link_free) + taken
        if num_bytes <= self.overtake:
            self._lane_free = left = max(now, self._lane_free) + taken
        return torch.tensor([math.ceil((left + self.latency) * NANO)], dtype=STAMP.dtype, device=self.device)

    def settle(self, where: str) -> None:
        """See `Transport`."""
        self.inner.settle(where)

    def poison(self, reason: str) -> None:
        """See `Transport`."""
        self.inner.poison(reason)

    def check(self, where: str) -> None:
        """See `Transport`."""
        self.inner.check(where)

    def close(self) -> None:
        """Close the inner transport. Idempotent."""
        self.inner.close()


class DelayedWork(Work[Messages]):
    """Messages that are returned no earlier than their link would have delivered them."""

    def __init__(
        self, transport: DelayedTransport, pending: Work[Messages], incoming: Sequence[Incoming], where: str
    ) -> None:
        super().__init__(incoming, where)
        self._transport, self._pending = transport, pending

    def _receive(self, index: int) -> list[Tensor]:
        give_up = time.monotonic() + self._transport.deadline
        stamp, *tensors = self._pending.wait_for(index)
        self._sleep(stamp, self.incoming[index], give_up)
        return tensors

    def _leave(self) -> None:
        self._pending.wait()

    def _sleep(self, stamp: Tensor, message: Incoming, give_up: float) -> None:
        """Sleep until the time of arrival. Sleeping leaves the core to the other ranks, as waiting for a link does."""
        there = _there(stamp)
        while (now := time.monotonic()) < min(there, give_up):
            time.sleep(min(there, give_up) - now)
        if now < there:
            line = self._transport
            shapes = ", ".join(f"{spec.shape} {spec.dtype}" for spec in message.specs) or "nothing"
            raise ExchangeError(
                f"rank {line.rank} at {self.where}: the link of {line.rate:g} bytes/s and {line.latency:g} s "
                f"delivers the message of rank {message.peer} ({shapes}) {there - now:.3g} s after the deadline of "
                f"{line.deadline:g} s: raise the deadline or the rate"
            )


def _there(stamp: Tensor) -> float:
    """Return the time of arrival of a message, by time.monotonic."""
    return int(stamp.item()) / NANO


def _with_stamp(message: Incoming) -> Incoming:
    return Incoming(message.peer, (STAMP, *message.specs), message.into and (None, *message.into))
