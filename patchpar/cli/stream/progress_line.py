"""How a stream is getting on: frames per second, time to the first frame, what is under way; as a line that lives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

WINDOW = 3.0
"""Seconds over which the rate on the line is taken."""


class ProgressMeter:
    """Counts frames as they come out. It begins when it is made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._recent: deque[tuple[float, int]] = deque()  # (when, frames)
        self._first: tuple[float, int] | None = None
        self._last = 0.0
        self.frames = self.most_under_way = 0

    def add(self, frames: int, under_way: int) -> None:
        """So many frames have come out, with so many blocks under way."""
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
        """Frames per second after the first block; None where no other has come."""
        if self._first is None or self._last <= self._first[0]:
            return None
        return (self.frames - self._first[1]) / (self._last - self._first[0])

    def line(self, status: str, under_way: int, seconds: float) -> str:
        """What is to be seen while it runs. `seconds`: of video that have come out."""
        words = [f"{int(seconds) // 60}:{seconds % 60:04.1f}", f"{self._rate():.1f} frames/s"]
        if self.first_frame is not None:
            words.append(f"first frame after {self.first_frame:.2f} s")
        words.append(f"{under_way} under way")
        return ", ".join(words if status == "running" else [*words, status])

    def _rate(self) -> float:
        """Frames per second of late."""
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return 0.0
        frames = sum(count for _, count in self._recent) - self._recent[0][1]
        return frames / (self._recent[-1][0] - self._recent[0][0])

    def as_dict(self) -> dict[str, Any]:
        """The figures of the whole stream."""
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
    """A line on stderr that can be replaced; where stderr is no terminal there is none."""
    with Console(stderr=True).status(first) as line:
        yield line.update
