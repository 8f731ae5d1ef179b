"""The device of each rank of a plan, where links between devices differ.

Axes are in order: neighbours along axis patch, which send most, are neighbours among the devices. From there two
devices are swapped as long as the step gets shorter, devices that are idle included; a descent as in Pipette (Yim et
al., DATE 2024, arXiv:2405.18093), which anneals.
"""

from itertools import combinations
from typing import Protocol

from patchpar.pipeline.planner.forecast import Forecast
from patchpar.plan.plan import Plan

TRIES = 50
GAIN = 0.995
"""Of a step's seconds: a smaller gain is none."""


class Simulate(Protocol):
    """Returns the forecast of a plan. `order`: the device of each rank; empty: in order. Raises PlanError."""

    def __call__(self, plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        """Return the forecast."""


def placed(found: Forecast, devices: int, simulate: Simulate) -> Forecast:
    """Return the forecast of the same plan with its ranks on the devices where it is fastest, in at most TRIES tries.

    `Forecast.order` has the device of each rank, then idle ones; empty where the order of the devices is best.
    """
    order, best, tries = found.order or tuple(range(devices)), found, 0
    improved = True
    while improved and tries < TRIES:
        improved = False
        for a, b in combinations(range(devices), 2):
            if a >= found.plan.world_size or tries == TRIES:
                break
            swapped = list(order)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            tries += 1
            other = simulate(found.plan, tuple(swapped))
            if other.step.seconds < GAIN * best.step.seconds:
                order, best, improved = tuple(swapped), other, True
    return best
