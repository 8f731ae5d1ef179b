"""A clock for tests, on which nothing takes time but what they say."""

from __future__ import annotations

import threading


class Clock(threading.local):
    """Stands for `time`: each rank, which is a thread or a process, has its own, which only its sleep moves on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds
