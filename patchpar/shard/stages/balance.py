"""Which blocks each stage runs: the division whose busiest stage has the least work. Pure arithmetic.

A chain of tasks on a chain of processors (Bokhari 1988), by dynamic programming.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

GAIN = 0.1  # of the busiest stage's seconds: measured again they differ by less
LEAST_SECONDS = 1e-3  # of a pass, for the same reason: what a process waits for a core


def balanced_by_time(
    costs: Sequence[float], seconds: Sequence[float], cuts: Collection[int], stages: int
) -> tuple[int, ...] | None:
    """Return the cuts that are best by the measured `seconds` of each block; see `balanced`.

    By `costs`, which are the same in every run, where those by seconds are hardly better or nothing was measured.
    """
    counted = balanced(costs, cuts, stages)
    measured = balanced(seconds, cuts, stages) if seconds else None
    if counted is None or measured is None:
        return counted
    before, after = busiest(seconds, counted), busiest(seconds, measured)
    return measured if before - after > max(LEAST_SECONDS, GAIN * before) else counted


def busiest(costs: Sequence[float], cuts: Sequence[int]) -> float:
    """Return the cost of the most expensive stage, of the blocks' `costs`."""
    return max(sum(costs[start:stop]) for start, stop in pairwise((0, *cuts, len(costs))))


def balanced(costs: Sequence[float], cuts: Collection[int], stages: int) -> tuple[int, ...] | None:
    """Return the `stages` - 1 of the possible `cuts` with which the most expensive stage is cheapest; None if too few.

    `costs`: of each block. A cut before block i is the number i. Of equal ones the first is taken. By dynamic
    programming, in time proportional to cuts * cuts * stages.
    """
    ends = [*sorted(cut for cut in cuts if 0 < cut < len(costs)), len(costs)]
    before = [0.0, *accumulate(costs)]
    found: dict[int, tuple[float, tuple[int, ...]]]
    found = {end: (before[end], ()) for end in ends}  # of the blocks before `end`, and where they are cut
    for _ in range(stages - 1):
        found = {
            end: min((max(worst, before[end] - before[cut]), (*chosen, cut)) for cut, (worst, chosen) in some.items())
            for end in ends
            if (some := {cut: each for cut, each in found.items() if cut < end})
        }
    best = found.get(len(costs))
    return None if best is None else best[1]
