"""`FramePlayer`: frames one after another when they are due."""

import threading
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

WAITING_SECONDS = 1.0
"""Seconds of frames that may wait until they are due; at least two blocks."""


class FramePlayer:
    """Calls `put` with each frame [H, W, 3] when it is due, at `fps`, in a thread.

    Drops the oldest frames if too many wait: more than a second of them and two blocks, or more than a block and
    `slack`. What waits is latency for good, since frames come as fast as they are played.
    """

    def __init__(self, put: Callable[[Tensor], object], fps: float, slack: int | None = None) -> None:
        self._put, self._period, self._slack = put, 1 / fps, slack
        self._waiting = deque[Tensor]()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._play, name="patchpar-player", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, frames_FHWC: Tensor) -> None:
        """Append frames."""
        with self._changed:
            self._waiting.extend(frames_FHWC)
            room = len(frames_FHWC) + (self._slack or 0)
            if self._slack is None:
                room = max(2 * len(frames_FHWC), round(WAITING_SECONDS / self._period))
            while len(self._waiting) > room:
                self._waiting.popleft()
            self._changed.notify()

    def close(self, *, drops: bool = False) -> None:
        """Wait until all frames have been played, unless it `drops` those that wait, and end the thread. Idempotent."""
        with self._changed:
            self._is_over = True
            if drops:
                self._waiting.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _play(self) -> None:
        due = time.monotonic()
        while (frame := self._next()) is not None:
            now = time.monotonic()
            if now > due + self._period:
                due = now  # a late frame delays all later ones
            time.sleep(max(0.0, due - now))
            self._put(frame)
            due += self._period

    def _next(self) -> Tensor | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            return self._waiting.popleft() if self._waiting else None
