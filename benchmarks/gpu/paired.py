"""Two steps timed in pairs, one right after the other: what both take in the same phase of the machine.

A processor that others use too, or that changes its clock, is fast for a while and then slow. The least time of each
step, or the median, may come from different phases. Both of a pair are run within a fraction of a second, so that the
ratio of a pair is hardly changed by a phase, and the median over pairs is not changed by the few in which one began.

Where others use the caches and the memory, what is limited by these slows more than Python. So the figures are of the
quarter of the pairs that took the least time: those in which the machine did little else.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """Seconds of two steps that ran in strictly alternating turns: the first and the second of each pair."""

    pairs: tuple[tuple[float, float], ...]

    @classmethod
    def together(cls, rounds: Iterable[PairedTimes]) -> PairedTimes:
        """Return the pairs of all rounds."""
        return cls(tuple(pair for each in rounds for pair in each.pairs))

    @property
    def least_disturbed(self) -> PairedTimes:
        """The quarter of the pairs that took the least time together, rounded up."""
        return PairedTimes(tuple(sorted(self.pairs, key=sum)[: -(-len(self.pairs) // 4)]))

    @property
    def first(self) -> float:
        """Median seconds of the first step."""
        return median(first for first, _ in self.pairs)

    @property
    def second(self) -> float:
        """Median seconds of the second step."""
        return median(second for _, second in self.pairs)

    @property
    def ratio(self) -> float:
        """Median over the pairs of the second step's seconds by those of the first."""
        return median(self._ratios())

    @property
    def quartiles(self) -> tuple[float, float]:
        """Ratios between which half of the pairs are."""
        lower, _, upper = quantiles(self._ratios(), n=4, method="inclusive")
        return lower, upper

    @property
    def difference(self) -> float:
        """Median over the pairs of the seconds that the second step takes longer."""
        return median(second - first for first, second in self.pairs)

    def _ratios(self) -> list[float]:
        return [second / first for first, second in self.pairs]


def in_pairs(
    first: Callable[[], object],
    second: Callable[[], object],
    pairs: int,
    clock: Callable[[], float] = time.process_time,
) -> PairedTimes:
    """Run two steps in turns, `pairs` times each, and return their times by a clock: processor time, if not given.

    Nothing that a cycle holds is freed meanwhile.
    """
    gc.collect()
    gc.disable()
    try:
        return PairedTimes(tuple((_seconds(first, clock), _seconds(second, clock)) for _ in range(pairs)))
    finally:
        gc.enable()


def _seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start
