"""Seconds of work on one device, and whether they are the same when it is measured again."""

import time
from collections.abc import Callable
from statistics import median

import torch

from patchpar.launch.accelerators import device_module

AGREE = 0.05
"""Two medians differ by at most this much on a machine that does nothing else."""
REPEATS, ROUNDS = 3, 4


class DeviceTimer:
    """Measures on `device`. `clock`: seconds, of the process."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self._clock = device, clock

    def once(self, run: Callable[[], object], times: int = 1) -> float:
        """Return the seconds of one of so many runs, until the device has ended them."""
        self._settle()
        start = self._clock()
        for _ in range(times):
            run()
        self._settle()
        return (self._clock() - start) / times

    def best(self, run: Callable[[], object], least: float = 0.01) -> float:
        """Return the least seconds of a short run, which is repeated for at least so many seconds, twice."""
        taken = max(self.once(run), 1e-7)
        times = max(1, round(least / taken))
        return min(self.once(run, times) for _ in range(2))

    def steady(self, run: Callable[[], object]) -> float | None:
        """Return the median seconds of a run; None if two medians never agree, since something else runs too."""
        before = None
        for _ in range(ROUNDS):
            now = median(self.once(run) for _ in range(REPEATS))
            if before is not None and abs(now / before - 1) <= AGREE:
                return (now + before) / 2
            before = now
        return None

    def _settle(self) -> None:
        if self.device.type != "cpu":
            device_module(self.device.type).synchronize()
