"""What one rank has sent, received and waited for, counted by kind of exchange."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from patchpar.comm.trace import TraceEvent
from patchpar.comm.transport import Stall


@dataclass(slots=True)
class CommStats:
    """What one rank has sent, received and waited for since the last `clear`, by kind of exchange.

    `events` are kept for a trace only where somebody has put a list there. `stalls`: waits of a GPU's stream, by kind,
    whose time is not in `seconds_waited` yet.
    """

    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_received: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    seconds_waited: dict[str, float] = field(default_factory=dict)
    stalls: list[tuple[str, Stall]] = field(default_factory=list)
    events: list[TraceEvent] | None = None

    def clear(self) -> None:
        """Start counting again."""
        for counted in (self.bytes_sent, self.bytes_received, self.rounds, self.seconds_waited):
            counted.clear()
        self.stalls.clear()
        if self.events is not None:
            self.events.clear()

    @property
    def total_bytes(self) -> int:
        """Bytes that left this rank, of every kind."""
        return sum(self.bytes_sent.values())

    def waited(self, kind: str, where: str, start: float, stalls: Sequence[Stall]) -> None:
        """A wait at the exchange point `where`, that began at `start` (time.perf_counter), has just ended."""
        self.book_wait(kind, time.perf_counter() - start)
        self.stalls += ((kind, stall) for stall in stalls)
        self.note("wait", kind, where, start)

    def book_wait(self, kind: str, seconds: float) -> None:
        """Add what was waited for an exchange of this kind."""
        self.seconds_waited[kind] = self.seconds_waited.get(kind, 0.0) + seconds

    def book_stalls(self, *, block: bool) -> None:
        """Add what streams have waited for to the seconds, as far as that is over, or `block` until all of it is."""
        lasting: list[tuple[str, Stall]] = []
        for kind, stall in self.stalls:
            seconds = stall.seconds(block=block)
            if seconds is None:
                lasting.append((kind, stall))
            else:
                self.book_wait(kind, seconds)
        self.stalls = lasting

    def note(self, what: str, kind: str, where: str, start: float) -> None:
        """Something that began at `start` (time.perf_counter) has just ended."""
        if self.events is not None:
            self.events.append(TraceEvent(what, kind, where, start, time.perf_counter() - start))
