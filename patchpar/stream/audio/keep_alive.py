"""`KeepAlive`: when a live stream goes on without audio, because none has been pushed in time."""

import time
from collections.abc import Callable

MARGIN = 0.2  # s; pushes that are late by less leave no gap


class KeepAlive:
    """Audio is expected at its own speed, from the first question on. Times in seconds; `clock` as time.monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start: float | None = None

    def seconds_left(self, begin: float, end: float) -> float:
        """Return how long to wait for the audio between these times of the stream; 0 once it is late."""
        now = self._clock()
        if self._start is None:
            self._start = now - begin
        return max(0.0, self._start + end + MARGIN - now)

    def used(self, end: float) -> None:
        """Note that the audio until `end` has been used: after a pause what follows is expected later by as much."""
        if self._start is not None:
            self._start = max(self._start, self._clock() - end - MARGIN)
