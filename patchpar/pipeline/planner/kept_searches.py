"""Results of searches for a plan, kept in files beside the tapes: the same search on the same machine is found again.

Read without torch, and without the tapes. A result depends on what tapes depend on, on the machine with all its rates
and links, and on what was asked for; any other is searched anew.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from patchpar.pipeline.planner.forecast import AnyMachine, Forecast, PhaseForecast
from patchpar.pipeline.planner.rank_memory import RankMemory
from patchpar.pipeline.planner.search import PlanSearchResult, search
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.plan.dataclass_json import decoded
from patchpar.plan.plan import Plan

SEARCH = "search"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptForecast:
    """What a file has of a `Forecast`: all but the machine, which its key has, the replay and the kernels."""

    plan: str
    steps: int
    warm_up_steps: int
    phases: Mapping[str, PhaseForecast]
    first: PhaseForecast
    step: PhaseForecast
    bytes_sent: tuple[Mapping[str, int], ...]
    memory: tuple[RankMemory, ...]
    assumed: tuple[str, ...]
    flops: tuple[int, ...]
    launching: float
    calls: int
    rounds: int
    order: tuple[int, ...]
    copied: tuple[int, ...]

    @classmethod
    def of(cls, found: Forecast) -> "KeptForecast":
        """Return what is kept of a forecast."""
        return cls(
            plan=str(found.plan),
            steps=found.steps,
            warm_up_steps=found.warm_up_steps,
            phases=found.phases,
            first=found.first,
            step=found.step,
            bytes_sent=tuple(found.bytes_sent),
            memory=tuple(found.memory),
            assumed=tuple(found.assumed),
            flops=tuple(found.flops),
            launching=found.launching,
            calls=found.calls,
            rounds=found.rounds,
            order=found.order,
            copied=tuple(found.copied),
        )

    def on(self, machine: AnyMachine) -> Forecast:
        """Return the forecast on its machine."""
        of_file = {field.name: getattr(self, field.name) for field in fields(self)}
        return Forecast(**{**of_file, "plan": Plan.parse(self.plan)}, machine=machine, replayed=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSearch:
    """What a file has of a `PlanSearchResult`."""

    ranked: tuple[KeptForecast, ...]
    refused: Mapping[str, str]
    skipped: tuple[str, ...]

    @classmethod
    def of(cls, found: PlanSearchResult) -> "KeptSearch":
        """Return what is kept of a result."""
        return cls(
            ranked=tuple(map(KeptForecast.of, found.ranked)),
            refused=found.refused,
            skipped=tuple(map(str, found.skipped)),
        )

    def on(self, machine: AnyMachine) -> PlanSearchResult:
        """Return the result on its machine. Raises PlanError for a text that is no plan."""
        return PlanSearchResult(
            ranked=[each.on(machine) for each in self.ranked],
            refused=self.refused,
            skipped=[Plan.parse(each) for each in self.skipped],
        )


def searched(simulator: Simulator, branches: int, strategy: Any, *, in_order: bool = False) -> PlanSearchResult:
    """Return what `search` finds for the call of a simulator, or has found before. Raises what `search` raises.

    Of a kept result, forecasts have no replay. One with a plan that is not that of its text is not kept.
    """
    machine, kept = simulator.machine, simulator.kept
    asked = {"branches": branches, "strategy": repr(strategy), "in_order": in_order}
    known = kept.find_entry(SEARCH, lambda found: decoded(KeptSearch, found).on(machine), asked)
    if known is not None:
        return known
    found = search(machine, branches, strategy, simulator.of, in_order=in_order)
    plans = [*(each.plan for each in found.ranked), *found.skipped]
    if all(Plan.parse(str(plan)) == plan for plan in plans):
        kept.keep_entry(SEARCH, asdict(KeptSearch.of(found)), asked)
    return found
