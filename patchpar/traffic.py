"""What one rank has sent, received and waited for, counted by kind of exchange."""

import time
from collections import Counter
from dataclasses import dataclass, field

from patchpar.trace import Event


@dataclass(slots=True)
class Traffic:
    """What one rank has sent, received and waited for since the last `clear`, by kind of exchange.

    `events` are kept for a trace only where somebody has put a list there.
    """

    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_received: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    seconds_waited: dict[str, float] = field(default_factory=dict)
    events: list[Event] | None = None

    def clear(self) -> None:
        """Start counting again."""
        for counted in (self.bytes_sent, self.bytes_received, self.rounds, self.seconds_waited):
            counted.clear()
        if self.events is not None:
            self.events.clear()

    @property
    def total_bytes(self) -> int:
        """Bytes that left this rank, of every kind."""
        return sum(self.bytes_sent.values())

    def note(self, what: str, kind: str, where: str, start: float) -> None:
        """Something that began at `start` (time.perf_counter) has just ended."""
        if self.events is not None:
            self.events.append(Event(what, kind, where, start, time.perf_counter() - start))
