"""Which blocks each stage runs: the division whose busiest stage has the least work. Pure arithmetic.

A chain of tasks on a chain of processors (Bokhari 1988), by dynamic programming.
"""

import math
from collections.abc import Collection, Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], cuts: Collection[int], stages: int) -> tuple[int, ...] | None:
    """Return the `stages` - 1 of the possible `cuts` with which the most expensive stage is cheapest; None if too few.

    `costs`: of each block. A cut before block i is the number i. Of equal ones the first is taken. By dynamic
    programming, in time proportional to cuts * cuts * stages.
    """
    ends = [*sorted(cut for cut in cuts if 0 < cut < len(costs)), len(costs)]
    before = [0.0, *accumulate(costs)]
    busiest: dict[int, tuple[float, tuple[int, ...]]]
    busiest = {end: (before[end], ()) for end in ends}  # of the blocks before `end`, and where they are cut
    for _ in range(stages - 1):
        busiest = {
            end: min((max(worst, before[end] - before[cut]), (*chosen, cut)) for cut, (worst, chosen) in some.items())
            for end in ends
            if (some := {cut: found for cut, found in busiest.items() if cut < end})
        }
    found = busiest.get(len(costs))
    return None if found is None or math.isnan(found[0]) else found[1]
