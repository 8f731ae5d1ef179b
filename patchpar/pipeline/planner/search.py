"""The best plan of a model on a machine: plans that can be, memory first, and a replay of those that may be fastest.

candidates    guidance branches x bands or tokens, whole weights; sharded where whole ones do not fit
refused       by the checks of a call, or by the model
too slow      one device's step divided by their ranks is longer than the best step so far
choice        the shortest step; within 3 %, fewer devices, then fewer bytes
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from patchpar.errors import PlanError
from patchpar.pipeline.planner.forecast import Forecast
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine

CLOSE = 1.03
"""Times of plans that count as equal."""

Simulate = Callable[[Plan], Forecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearchResult:
    """Forecasts of the plans that were replayed, the best first; plans that were refused, with reasons; and skipped."""

    ranked: Sequence[Forecast]
    refused: Mapping[str, str]
    skipped: Sequence[Plan]

    @property
    def best(self) -> Forecast:
        """The plan to take. Raises PlanError where none fits the memory."""
        fitting = [each for each in self.ranked if fits(each)]
        if not fitting:
            raise PlanError(
                "no plan fits the memory of its devices: use a smaller --dtype, a smaller image, or devices with more"
            )
        return fitting[0]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plans = [{**each.as_dict(), "fits": fits(each)} for each in self.ranked]
        return {"plans": plans, "refused": dict(self.refused), "too_slow": [str(plan) for plan in self.skipped]}


def search(machine: Machine, branches: int, strategy: Any, simulate: Simulate) -> PlanSearchResult:
    """Return what plans for at most all devices of a machine take, for a call with so many guidance branches.

    `strategy`: of plans with axis patch. Raises what `simulate` raises for one device.
    """
    one = simulate(Plan())
    found, refused, skipped = [one], dict[str, str](), list[Plan]()
    for plan in candidates(machine.devices, branches, strategy):
        best = min((each.step.seconds for each in found if fits(each)), default=float("inf"))
        if one.step.compute / plan.world_size > best * CLOSE:
            skipped.append(plan)
            continue
        try:
            forecast = simulate(plan)
            if not fits(forecast):
                found.append(forecast)
                forecast = simulate(replace(plan, weights="sharded"))
            found.append(forecast)
        except PlanError as error:
            refused[str(plan)] = str(error)
    return PlanSearchResult(ranked=ranked(found), refused=refused, skipped=skipped)


def candidates(devices: int, branches: int, strategy: Any) -> Iterator[Plan]:
    """Yield plans with more ranks than one, those with most first: powers of two on axis patch, and all devices."""
    plans = {
        Plan(cfg=cfg, patch=patch, strategy=strategy if patch > 1 else "exact")
        for cfg in {1, branches}
        for patch in _degrees(devices // cfg)
        if cfg * patch > 1
    }
    yield from sorted(plans, key=lambda plan: (-plan.world_size, plan.patch))


def _degrees(most: int) -> set[int]:
    return {most, *(2**power for power in range(most.bit_length()))} if most else set()


def fits(found: Forecast) -> bool:
    """Whether the memory of every rank is enough."""
    return max(each.total for each in found.memory) <= found.machine.device.memory


def ranked(found: Sequence[Forecast]) -> list[Forecast]:
    """Return forecasts with the best first: those that fit, and of about equal times the plan with fewer devices."""
    remaining = sorted(found, key=lambda each: (not fits(each), each.step.seconds))
    ordered = []
    while remaining:
        first = remaining[0]
        close = [
            each for each in remaining if fits(each) == fits(first) and each.step.seconds <= CLOSE * first.step.seconds
        ]
        best = min(close, key=lambda each: (each.plan.world_size, _bytes(each), each.step.seconds))
        ordered.append(best)
        remaining.remove(best)
    return ordered


def _bytes(found: Forecast) -> int:
    return max(sum(sent.values()) for sent in found.bytes_sent)
