"""`RealtimeClock`: when a chunk is due that is shown at its timestamp, before and after an outage."""

CATCH_UP = 1.1
"""Speed of the chunks that follow a late one, until they are due as early as they were at first."""


class RealtimeClock:
    """Times in seconds: `now` on the clock of time.monotonic, `pts` from the beginning of the stream.

    A chunk that comes late is due at once. Those after it are due at CATCH_UP times their speed, or at once where the
    queue has dropped others, but never earlier than by the clock that the first chunk has set.
    """

    def __init__(self) -> None:
        self._first: float | None = None  # time at which pts=0 was due at first
        self._start = self._pts = 0.0  # the same now, and the last timestamp
        self._dropped = 0

    @property
    def behind(self) -> float:
        """Seconds by which chunks are due later than by the first chunk's clock."""
        return 0.0 if self._first is None else self._start - self._first

    def due(self, pts: float, now: float, dropped: int) -> float:
        """Return when the next chunk is due, `now` at the earliest. `dropped`: chunks that were dropped until now."""
        if self._first is None:
            self._first = self._start = now - pts
        # At CATCH_UP times its speed an interval between two chunks is shorter by this part of it.
        earlier = max(0.0, pts - self._pts) * (1 - 1 / CATCH_UP)
        start = self._start - earlier if dropped == self._dropped else self._first
        self._start = max(self._first, start, now - pts)
        self._pts, self._dropped = pts, dropped
        return self._start + pts
