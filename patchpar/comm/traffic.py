"""Communication statistics of one rank by kind of exchange: bytes, rounds and seconds waited."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from patchpar.comm.trace import TraceEvent
from patchpar.comm.transport import Stall

Booked = tuple[str, int, int]
"""A kind with the bytes that are sent and received of it."""


@dataclass(slots=True)
class CommStats:
    """Bytes, rounds and seconds waited since the last `clear`, by kind of exchange.

    `events` are recorded for a trace only if set to a list. `stalls`: waits of a GPU's stream, by kind, whose time is
    not in `seconds_waited` yet. What is awaited together counts as of the kind that is asked for.
    """

    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_received: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    seconds_waited: dict[str, float] = field(default_factory=dict)
    stalls: list[tuple[str, Stall]] = field(default_factory=list)
    events: list[TraceEvent] | None = None

    def clear(self) -> None:
        """Reset all counts."""
        for counted in (self.bytes_sent, self.bytes_received, self.rounds, self.seconds_waited):
            counted.clear()
        self.stalls.clear()
        if self.events is not None:
            self.events.clear()

    @property
    def total_bytes(self) -> int:
        """Bytes sent by this rank, of all kinds."""
        return sum(self.bytes_sent.values())

    def book(self, booked: Sequence[Booked]) -> None:
        """Add bytes sent and received by an exchange."""
        all_sent, all_received = self.bytes_sent, self.bytes_received
        for kind, sent, received in booked:
            all_sent[kind] += sent
            all_received[kind] += received

    def waited(self, kind: str, where: str, start: float, stalls: Sequence[Stall]) -> None:
        """Record a wait at the exchange point `where` that began at `start` (time.perf_counter) and ends now."""
        self.seconds_waited[kind] = self.seconds_waited.get(kind, 0.0) + time.perf_counter() - start
        for stall in stalls:
            self.stalls.append((kind, stall))
        if self.events is not None:
            self.note("wait", kind, where, start)

    def book_stalls(self, *, block: bool) -> None:
        """Add the waits of GPU streams that have ended to the seconds; `block` until all have ended."""
        lasting: list[tuple[str, Stall]] = []
        waited = self.seconds_waited
        for kind, stall in self.stalls:
            seconds = stall.seconds(block=block)
            if seconds is None:
                lasting.append((kind, stall))
            else:
                waited[kind] = waited.get(kind, 0.0) + seconds
        self.stalls = lasting

    def note(self, what: str, kind: str, where: str, start: float) -> None:
        """Record an interval for the trace that began at `start` (time.perf_counter) and ends now."""
        if self.events is not None:
            self.events.append(TraceEvent(what, kind, where, start, time.perf_counter() - start))
