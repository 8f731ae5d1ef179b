"""The plan with the shortest predicted step for a call on a machine, among those that fit the memory.

1. One device, then guidance branches times axis patch, with powers of two and all devices. Where whole weights do not
   fit, weights are sharded; where they do not fit one device, features and blocks are divided too (axes tensor, stage).
2. A plan is not replayed if what one device of its guidance branch computes, divided by the ranks of axis patch, takes
   longer than the best step so far; nor if that, or what it launches, takes about as long as a plan with fewer devices.
   Each rank runs as many kernels, and a small one does not get shorter with fewer rows; and in an exact step it waits
   for one message at least in each attention between tokens of the image.
3. Where waits for keys and values are worth it, rings and Ulysses in the place of gathering them.
4. Where links or devices differ, ranks are swapped as long as that makes the best step shorter. Of devices of several
   kinds a plan takes the fastest, with parts of the image by their speed (`uneven_devices`).
5. Of plans of about equal times the one with fewest devices is taken, then an exact one, then the one that sends least.
   Devices that do not help stay idle.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from patchpar.errors import PlanError
from patchpar.pipeline.planner.forecast import AnyMachine, Forecast
from patchpar.pipeline.planner.placement import Simulate, placed
from patchpar.pipeline.planner.plan_order import CLOSE, PlanStep, best_first
from patchpar.pipeline.planner.uneven_devices import UnevenDevices
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.link_model import EXPOSED_FRACTION, EdgeChoice
from patchpar.plan.plan import Plan
from patchpar.strategies.exact import ExactPatch

KEYS = "kv"
"""The kind of exchange that other ways of attention change."""
EDGE_KINDS = ("halo", "moments", "moments+halo")
"""Waits for what is fresh or stale with the edges, by kind; both may be in one message."""
FIRST = 16
"""Devices among which the fastest link is looked for."""
GAIN = 0.8
"""Of the step of one device: where no division makes it shorter than that, small plans are tried first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearchResult:
    """Forecasts of the plans that were replayed, the best first; plans that were refused, with reasons; and skipped."""

    ranked: Sequence[Forecast]
    refused: Mapping[str, str]
    skipped: Sequence[Plan]

    @property
    def best(self) -> Forecast:
        """The plan to take. Raises PlanError where none fits the memory."""
        fitting = [each for each in self.ranked if each.fits]
        if fitting:
            return fitting[0]
        taken = [(*each.largest_memory, each.plan) for each in self.ranked]
        total, device, plan = min(taken, key=lambda found: found[0] - found[1].memory)
        raise PlanError(
            f"no plan fits the memory of its devices: {plan} comes nearest, with {readable_bytes(total)} on a "
            f"{device.name}, which has {readable_bytes(device.memory)}: use a smaller --dtype or image, or others"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plans = [{**each.as_dict(), "fits": each.fits} for each in self.ranked]
        return {"plans": plans, "refused": dict(self.refused), "too_slow": [str(plan) for plan in self.skipped]}


def search(
    machine: AnyMachine, branches: int, strategy: Any, simulate: Simulate, *, in_order: bool = False
) -> PlanSearchResult:
    """Return what plans for at most all devices of a machine take, for a call with so many guidance branches.

    `strategy`: of plans with axis patch. `in_order`: ranks are not swapped, so that each sits on a device after that of
    the rank before. Raises what `simulate` raises for one device.
    """
    on_devices = UnevenDevices(machine, simulate, in_order=in_order) if machine.is_mixed else simulate
    found = _Search(on_devices, branches, latency_of(machine))
    for plan in found.in_order(list(candidates(machine.devices, branches, strategy, every=machine.is_mixed))):
        found.try_unless_slow(plan)
    for base in list(found.forecasts):
        if found.may_gain(base):
            for plan in attention_variants(base.plan):
                found.try_plan(plan)
    if not found.fits_one_device:
        found.try_divided_weights(Plan())
        for plan in divided_models(machine.devices, branches):
            found.try_divided(plan)
    return found.result(machine, may_exchange=not in_order)


class _Search:
    """Forecasts so far. Raises what `simulate` raises for one device."""

    def __init__(self, simulate: Simulate, branches: int, latency: float) -> None:
        self._simulate, self._branches, self._latency = simulate, branches, latency
        self._one = simulate(Plan())
        self.forecasts = [self._one]
        self._unsplit = {1: self._one}  # forecasts without axis patch, by their degree of cfg
        self._refused: dict[str, str] = {}
        self._skipped: list[Plan] = []

    @property
    def fits_one_device(self) -> bool:
        """Whether the whole model fits one device."""
        return self._one.fits

    def try_unless_slow(self, plan: Plan) -> None:
        """Replay a plan, unless by what it computes and launches one with fewer devices is about as fast."""
        base = self._unsplit.get(plan.cfg)  # of as many branches, on one device each
        if base is None:
            by_call = 1 if self._one.calls == 1 else self._branches  # launches of one rank, and of all
            least = _least(self._one, plan.world_size, by_call)
        else:
            least = _least(base, plan.patch)
        least += self._waiting(plan)
        if self._may_win(least, plan):
            self.try_plan(plan)
        else:
            self._skipped.append(plan)

    def _waiting(self, plan: Plan) -> float:
        """Return the seconds for which an exact step waits at least: for a message in each round."""
        if plan.patch == 1 or plan.strategy.policy.remembers or self._one.work is None:
            return 0.0
        rounds = [each.rounds for each in self.forecasts if each.plan.patch > 1]
        return self._latency * max([self._one.work.mixes, *rounds])

    def in_order(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return plans in the order in which they are tried: those that divide most first, unless that gains little.

        Then the first ones show how long a step waits at least, and the others need no replay.
        """
        most = max((plan.world_size for plan in plans), default=1)
        gains = _least(self._one, most) < GAIN * self._one.step.seconds
        return sorted(
            plans, key=lambda plan: (plan.patch > 1, -plan.world_size if gains else plan.world_size, plan.patch)
        )

    def _may_win(self, least: float, plan: Plan) -> bool:
        """Whether a plan whose step takes at least so many seconds may be the one to take."""
        fitting = [each for each in self.forecasts if each.fits]
        if any(CLOSE * least >= each.step.seconds for each in fitting if each.plan.world_size < plan.world_size):
            return False
        return least <= CLOSE * min((each.step.seconds for each in fitting), default=float("inf"))

    def try_plan(self, plan: Plan) -> None:
        """Replay a plan; with sharded or hosted weights too, where whole ones do not fit."""
        forecast = self._tried(plan)
        if forecast is None:
            return
        if plan.patch == 1:
            self._unsplit[plan.cfg] = forecast
        if not forecast.fits and plan.weights == "whole" and plan.stage * plan.tensor == 1:
            self.try_divided_weights(plan)

    def try_divided_weights(self, plan: Plan) -> None:
        """Replay a plan with sharded weights, and with hosted ones where these do not fit or there is one rank."""
        several = plan.world_size > plan.data
        found = self._tried(replace(plan, weights="sharded")) if several else None
        if found is None or not found.fits:
            self._tried(replace(plan, weights="hosted"))

    def _tried(self, plan: Plan) -> Forecast | None:
        """Return the forecast of a plan, which is kept; None where the plan is refused, whose reason is kept."""
        try:
            self.forecasts.append(self._simulate(plan))
        except PlanError as error:
            self._refused[str(plan)] = str(error)
            return None
        return self.forecasts[-1]

    def try_divided(self, plan: Plan) -> None:
        """Replay a plan that divides the network itself, unless its first call needs more than a device holds."""
        weights, device = self._one.memory[0].weights, self._one.device_of(0)
        if plan.tensor > 1 and plan.weights == "whole" and weights > device.memory:
            self._refused[str(plan)] = (
                f"its first call takes whole weights, {readable_bytes(weights)}, and a {device.name} has "
                f"{readable_bytes(device.memory)}: weights=hosted loads them in parts"
            )
        else:
            self.try_plan(plan)

    def may_gain(self, base: Forecast) -> bool:
        """Whether a plan without any of its waits for keys and values may be the one to take."""
        least = base.step.seconds - base.step.exposed.get(KEYS, 0.0)
        return base.step.seconds > CLOSE * least and self._may_win(least, base.plan)

    def result(self, machine: AnyMachine, *, may_exchange: bool) -> PlanSearchResult:
        """Return all, the best with its ranks where they are fastest. `may_exchange`: ranks may change devices."""
        best, *others = ranked(self.forecasts)
        if may_exchange and best.fits and not machine.is_uniform and best.plan.world_size > 1:
            best = placed(best, machine.devices, self._simulate)
        return PlanSearchResult(ranked=[best, *others], refused=self._refused, skipped=self._skipped)


def _least(found: Forecast, parts: int, calls: int = 1) -> float:
    """Return the least seconds of a step of which a rank computes one of so many parts, in one of so many calls.

    Where all ranks make all calls, each launches as many kernels as one device does, and each kernel is as long as with
    a part of the rows.
    """
    launching = found.launching / calls
    if found.work is None or calls > 1:
        return max(found.step.compute / parts, launching)
    return max(found.work.seconds(parts), launching)


def latency_of(machine: AnyMachine) -> float:
    """Return the least latency of a message between the first devices of a machine."""
    pairs = combinations(range(min(machine.devices, FIRST)), 2)
    topology = machine.topology()
    return min((topology.path(*pair).latency for pair in pairs), default=0.0)


def candidates(devices: int, branches: int, strategy: Any, *, every: bool = False) -> Iterator[Plan]:
    """Yield plans with more ranks than one: powers of two on axis patch, and all devices; or `every` number of them."""
    plans = {
        Plan(cfg=cfg, patch=patch, strategy=strategy if patch > 1 else "exact")
        for cfg in {1, branches}
        for patch in (range(1, devices // cfg + 1) if every else _degrees(devices // cfg))
        if cfg * patch > 1
    }
    yield from sorted(plans, key=lambda plan: (plan.patch > 1, plan.world_size, plan.patch))


def attention_variants(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with its keys and values exchanged in other ways, all exact; none where a way was asked for."""
    if plan.patch == 1 or plan.strategy != ExactPatch():
        return
    groups = [each for each in range(2, plan.patch + 1) if plan.patch % each == 0]
    modes = [ExactPatch(overlap=True), ExactPatch(ulysses=plan.patch), ExactPatch(attention="ring")]
    if plan.patch > 2:
        modes += [
            ExactPatch(attention="two-way-ring"),
            ExactPatch(attention="ring", ulysses=groups[len(groups) // 2 - 1]),
        ]
    for mode in modes:
        yield replace(plan, strategy=mode)


def divided_models(devices: int, branches: int) -> Iterator[Plan]:
    """Yield exact plans that divide the network itself, for models that no device holds whole.

    Features of Linears (axis tensor), and runs of blocks (axis stage) that come from host memory.
    """
    for cfg in sorted({1, branches}):
        for degree in sorted(_degrees(devices // cfg) - {1}):
            yield Plan(cfg=cfg, tensor=degree)
            yield Plan(cfg=cfg, stage=degree, weights="hosted")


def _degrees(most: int) -> set[int]:
    return {most, *(2**power for power in range(most.bit_length()))} if most else set()


def edges_of(found: Forecast) -> EdgeChoice:
    """Return whether fresh halos and moments are worth their waits in a replayed step; see `edges_for`."""
    waits = sum(found.step.exposed.get(kind, 0.0) for kind in EDGE_KINDS)
    worth = waits <= EXPOSED_FRACTION * found.step.seconds
    return EdgeChoice(
        "fresh" if worth else "stale",
        f"waits for halos and moments take {waits / found.step.seconds:.0%} of a step"
        + ("" if worth else ": try --strategy displaced, whose edges are stale, and compare the images"),
    )


def ranked(found: Sequence[Forecast]) -> list[Forecast]:
    """Return forecasts with the best first, see `best_first`."""
    return [found[at] for at in best_first([*map(step_of, found)])]


def step_of(found: Forecast) -> PlanStep:
    """Return a later step of a forecast."""
    most = max(sum(sent.values()) for sent in found.bytes_sent)
    return PlanStep(plan=found.plan, seconds=found.step.seconds, sent=most, fits=found.fits)
