"""Plans on devices of several kinds: the fastest ones that a plan needs, and a part of the image for each by its speed.

Speeds are those of the whole call on one device, of its kernels alone where plans of several run as graphs: one device
may have to wait for launches, and they do not. Ranks with the same part of the image, one for each guidance branch,
sit on devices of about equal speed. Parts begin in proportion to speeds; then each is scaled by how much longer or
shorter its rank computes than the others, as long as that makes the step shorter.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from patchpar.pipeline.planner.forecast import AnyMachine, Forecast
from patchpar.pipeline.planner.placement import Simulate
from patchpar.plan.part_ratio import ratio_of
from patchpar.plan.plan import Plan
from patchpar.plan.replay.replay import COMPUTE, STEP

TRIES = 4
"""Ratios after the first. Each has programs of its own, which have to be recorded."""


class UnevenDevices:
    """Simulates plans on the devices of a mixed machine that suit them. Raises what `simulate` raises.

    `in_order`: the ranks of a plan sit on devices in ascending order, as where they have NCCL's groups.
    """

    def __init__(self, machine: AnyMachine, simulate: Simulate, *, in_order: bool = False) -> None:
        self._simulate, self._devices, self._in_order = simulate, machine.devices, in_order
        self._kinds = [machine.device_at(number).name for number in range(machine.devices)]
        alone = {kind: simulate(Plan(), self._order([self._kinds.index(kind)])) for kind in dict.fromkeys(self._kinds)}
        self._seconds = [_seconds_beside_others(alone[kind]) for kind in self._kinds]
        self._fastest = sorted(range(machine.devices), key=lambda number: (self._seconds[number], number))

    def __call__(self, plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        """Return the forecast of a plan; with an `order` on these devices, else on those that suit it, with a ratio."""
        if order:
            return self._simulate(plan, order)
        order, speeds = self.devices_of(plan)
        ratio = ratio_of(speeds) if plan.patch > 1 else ()
        found = self._simulate(replace(plan, ratio=ratio), order)
        kinds = {self._kinds[device] for device in order[: plan.world_size]}
        for _ in range(TRIES if plan.patch > 1 and len(kinds) > 1 else 0):
            ratio = self._next(found)
            if replace(plan, ratio=ratio) == found.plan:
                break
            other = self._simulate(replace(plan, ratio=ratio), order)
            if other.step.seconds >= found.step.seconds:
                break
            found = other
        return found

    def devices_of(self, plan: Plan) -> tuple[tuple[int, ...], list[float]]:
        """Return the device of each rank, then idle ones; and the speed of each part of the image."""
        beside = plan.world_size // plan.patch  # ranks with the same part
        taken = self._fastest[: plan.world_size]
        parts = [taken[first : first + beside] for first in range(0, len(taken), beside)]
        ranks = [part[number] for number in range(beside) for part in parts]
        if self._in_order:
            ranks = sorted(taken)
            parts = [ranks[first :: plan.patch] for first in range(plan.patch)]
        return self._order(ranks), [1 / max(self._seconds[device] for device in part) for part in parts]

    def _order(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return (*ranks, *(device for device in range(self._devices) if device not in ranks))

    def _next(self, found: Forecast) -> tuple[int, ...]:
        """Return the parts with which all ranks would compute as long, were that in proportion to them."""
        size = found.plan.patch
        ratio = found.plan.parts or (1,) * size
        seconds = [0.0] * size
        for rank, taken in computing(found).items():
            seconds[rank % size] = max(seconds[rank % size], taken)
        return ratio_of([part / taken if taken else 0.0 for part, taken in zip(ratio, seconds, strict=True)])


def _seconds_beside_others(alone: Forecast) -> float:
    """Return the seconds by which a device counts in plans of several, which launch nothing where they are graphs."""
    return alone.step.seconds if alone.launching else alone.step.compute


def computing(found: Forecast) -> Counter[int]:
    """Return the seconds that each rank computes in the last step of a forecast with its replay."""
    assert found.replayed is not None
    steps = [each for each in found.replayed.intervals if each.what == STEP and each.name.startswith("step ")]
    last = {each.rank: each for each in steps}  # in order
    seconds: Counter[int] = Counter()
    for each in found.replayed.intervals:
        step = last.get(each.rank)
        if each.what == COMPUTE and step is not None and step.start <= each.start < step.start + step.seconds:
            seconds[each.rank] += each.seconds  # type: ignore[assignment]  # a Counter of floats
    return seconds
