"""`FramePlayer`: frames one after another when they are due."""

import threading
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

WAITING_SECONDS = 1.0
"""Seconds of frames that may wait until they are due; at least two blocks."""
CLOSE_SECONDS = 5.0
"""Of a stream of less than a frame per second the last frames may be due in an hour."""


class FramePlayer:
    """Calls `put` with each frame [H, W, 3] when it is due, at `fps`, in a thread.

    Drops the oldest frames if too many wait: more than a second of them and two blocks, or more than a block and
    `slack`. What waits is latency for good, since frames come as fast as they are played.
    """

    def __init__(self, put: Callable[[Tensor], object], fps: float, slack: int | None = None) -> None:
        self._put, self._period, self._slack = put, 1 / fps, slack
        self._waiting = deque[Tensor]()
        self._changed = threading.Condition()
        self._is_over = self._drops = False
        self._thread = threading.Thread(target=self._play, name="patchpar-player", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, frames_FHWC: Tensor) -> None:
        with self._changed:
            self._waiting.extend(frames_FHWC)
            room = len(frames_FHWC) + (self._slack or 0)
            if self._slack is None:
                room = max(2 * len(frames_FHWC), round(WAITING_SECONDS / self._period))
            while len(self._waiting) > room:
                self._waiting.popleft()
            self._changed.notify()

    def close(self, *, drops: bool = False) -> None:
        """Wait up to CLOSE_SECONDS until all frames have been played, unless it `drops` those that wait. Idempotent."""
        with self._changed:
            self._is_over, self._drops = True, self._drops or drops
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        with self._changed:
            self._drops = True
            self._changed.notify_all()

    def _play(self) -> None:
        due = time.monotonic()
        while (frame := self._next()) is not None:
            now = time.monotonic()
            if now > due + self._period:
                due = now  # a late frame delays all later ones
            if not self._sleep_until(due):
                return
            self._put(frame)
            due += self._period

    def _sleep_until(self, due: float) -> bool:
        """Wait until a frame is due; False if it is dropped at the end."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._drops, max(0.0, due - time.monotonic()))

    def _next(self) -> Tensor | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            return self._waiting.popleft() if self._waiting else None
