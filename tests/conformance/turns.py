"""Ranks as threads of which one runs at a time, until it waits: the same order in every run, and no hang unnoticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Deadlock(RuntimeError):
    """Every rank that has not ended waits for another. NCCL would wait until the group is aborted."""


class Turns:
    """Passes the turn between the threads of `world` ranks."""

    def __init__(self, world: int, state: Callable[[], str]) -> None:
        self.world, self._state = world, state
        self._changed = threading.Condition()
        self._turn = 0
        self._waits_for: list[Callable[[], bool] | None] = [None] * world
        self._ended = [False] * world
        self._stuck = ""

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What `function(rank)` returns, or the exception that it raises, on each rank."""
        found: list[Any] = [None] * self.world

        def live(rank: int) -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == rank)
            try:
                found[rank] = function(rank)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                found[rank] = error
            self._ended[rank] = True
            self._pass_on(rank)

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def wait(self, rank: int, is_over: Callable[[], bool]) -> None:
        """Let other ranks run until `is_over`. Raises Deadlock if none can."""
        if is_over():
            return
        self._waits_for[rank] = is_over
        self._pass_on(rank)
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)
        self._waits_for[rank] = None
        if not is_over():
            raise Deadlock(f"no rank can go on: {self._stuck}")

    def _pass_on(self, rank: int) -> None:
        order = [(rank + step) % self.world for step in range(1, self.world + 1)]
        going = [other for other in order if not self._ended[other]]
        able = [other for other in going if self._can_go_on(other)]
        if going and not able:
            self._stuck = self._stuck or self._state()
        with self._changed:
            self._turn = (able or going or [-1])[0]
            self._changed.notify_all()

    def _can_go_on(self, rank: int) -> bool:
        is_over = self._waits_for[rank]
        return is_over is None or is_over()
