"""Seconds of work on one device, and whether they are the same when it is measured again.

A run during which another process had the core is known by what the system says of its threads: how long they were
ready to run and did not. Such runs do not count. Where the system does not say it, all count, and only runs that take
other times when they are measured again tell that a machine is busy.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from patchpar.launch.accelerators import device_module

AGREE = 0.05
"""Two medians differ by at most this much on a machine that does nothing else."""
PREEMPTED = 0.03
"""Of a run: one that waited longer for a core does not count."""
REPEATS, ROUNDS = 3, 10
LEAST = 0.01  # s
THREADS = Path("/proc/self/task")
"""On Linux, a folder for each thread of this process; its file `schedstat` has the nanoseconds for which it ran, and
for which it was ready to run and did not."""


class TimedRun(NamedTuple):
    """Seconds of a run, and seconds for which threads of this process were ready and others had their cores."""

    seconds: float
    waited: float = 0.0

    @property
    def is_preempted(self) -> bool:
        """Whether the run does not tell how long it takes alone."""
        return self.waited > PREEMPTED * self.seconds


def settled(rounds: Sequence[Sequence[TimedRun]]) -> float | None:
    """Return the seconds of a run that was measured in rounds; None until the last two medians agree.

    Rounds of which most runs were preempted do not count.
    """
    calm = [[run.seconds for run in each if not run.is_preempted] for each in rounds]
    medians = [median(left) for left, each in zip(calm, rounds, strict=True) if 2 * len(left) > len(each)]
    if len(medians) < 2 or abs(medians[-1] / medians[-2] - 1) > AGREE:
        return None
    return (medians[-1] + medians[-2]) / 2


def waited_for_cores() -> float:
    """Return the seconds for which threads of this process were ready and others ran; 0.0 where nothing tells it."""
    waited = 0
    for file in THREADS.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile, or another system
            waited += int(file.read_text().split()[1])
    return waited / 1e9


class DeviceTimer:
    """Measures on `device`. `clock`: seconds, of the process. `waited`: see `waited_for_cores`."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        waited: Callable[[], float] = waited_for_cores,
    ) -> None:
        self.device, self._clock, self._waited = device, clock, waited

    def once(self, run: Callable[[], object], times: int = 1) -> TimedRun:
        """Return the seconds of one of so many runs, until the device has ended them."""
        self._settle()
        before = self._waited()
        start = self._clock()
        for _ in range(times):
            run()
        self._settle()
        seconds = self._clock() - start
        return TimedRun(seconds / times, max(0.0, self._waited() - before) / times)

    def best(self, run: Callable[[], object]) -> float:
        """Return the least seconds of a short run, of at least LEAST together, twice with the core to itself.

        Of a run that is preempted again and again the least seconds are returned too. The first run, in which kernels
        are loaded and chosen, does not count.
        """
        run()
        times = max(1, round(LEAST / max(self.once(run).seconds, 1e-7)))
        runs: list[TimedRun] = []
        while len(runs) < REPEATS * 2 and sum(not each.is_preempted for each in runs) < 2:
            runs.append(self.once(run, times))
        return min(each.seconds for each in runs)

    def round(self, run: Callable[[], object]) -> list[TimedRun]:
        """Return the seconds of REPEATS runs, one after the other."""
        return [self.once(run) for _ in range(REPEATS)]

    def steady(self, run: Callable[[], object]) -> float | None:
        """Return the median seconds of a run; None if two medians never agree, since something else runs too."""
        rounds: list[list[TimedRun]] = []
        found = None
        while found is None and len(rounds) < ROUNDS:
            rounds.append(self.round(run))
            found = settled(rounds)
        return found

    def _settle(self) -> None:
        if self.device.type != "cpu":
            device_module(self.device.type).synchronize()
