"""Status line of a stream: frames per second, time to the first frame, blocks in flight."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

WINDOW = 3.0
"""Seconds over which the rate on the status line is measured."""


class ProgressMeter:
    """Counts output frames. Time starts at construction."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._recent: deque[tuple[float, int]] = deque()  # (when, frames)
        self._first: tuple[float, int] | None = None
        self._last = 0.0
        self.frames = self.most_under_way = 0

    def add(self, frames: int, under_way: int) -> None:
        """Count output frames. `under_way`: blocks in flight."""
        now = self._clock() - self._began
        self._first = self._first or (now, frames)
        self._last, self.frames = now, self.frames + frames
        self.most_under_way = max(self.most_under_way, under_way)
        self._recent.append((now, frames))
        while self._recent[0][0] < now - WINDOW and len(self._recent) > 2:
            self._recent.popleft()

    @property
    def first_frame(self) -> float | None:
        """Seconds to the first frame."""
        return None if self._first is None else self._first[0]

    @property
    def fps(self) -> float | None:
        """Frames per second after the first block; None before the second."""
        if self._first is None or self._last <= self._first[0]:
            return None
        return (self.frames - self._first[1]) / (self._last - self._first[0])

    def line(self, status: str, under_way: int, seconds: float) -> str:
        """Return the status line. `seconds`: length of the output so far."""
        words = [f"{int(seconds) // 60}:{seconds % 60:04.1f}", f"{self._rate():.1f} frames/s"]
        if self.first_frame is not None:
            words.append(f"first frame after {self.first_frame:.2f} s")
        words.append(f"{under_way} in flight")
        return ", ".join(words if status == "running" else [*words, status])

    def _rate(self) -> float:
        """Frames per second in the last WINDOW seconds."""
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return 0.0
        frames = sum(count for _, count in self._recent) - self._recent[0][1]
        return frames / (self._recent[-1][0] - self._recent[0][0])

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics of the whole stream."""
        return {
            "frames": self.frames,
            "fps": self.fps,
            "first_frame": self.first_frame,
            "most_under_way": self.most_under_way,
        }

    def __str__(self) -> str:
        if self.first_frame is None:
            return "no frame came out"
        rate = "" if self.fps is None else f" at {self.fps:.1f} frames/s"
        return f"{self.frames} frames{rate}, the first after {self.first_frame:.2f} s"


@contextmanager
def living_line(first: str) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr that can be updated; nothing is shown if stderr is no terminal."""
    with Console(stderr=True).status(first) as line:
        yield line.update
