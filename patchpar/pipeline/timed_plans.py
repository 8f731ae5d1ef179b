"""plan="auto" by predicted seconds, on a machine that `patchpar tune` has measured; elsewhere the rule stays as it is.

A call is searched for plans as `patchpar plan --machine local` does, once for each size, and always exact. After each
later call the seconds of its ranks are compared with the forecast: off by more than 25 % twice in a row, the
measurement of kernels is scaled to what calls take, in its file too. An exact plan that was asked for stays, except
that keys are attended to as they arrive where that is faster.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.fork_guard import change_in_children
from patchpar.models.info import PipelineInfo
from patchpar.pipeline.auto_plan import PlanChoice
from patchpar.pipeline.model_to_load import ModelInFiles, ModelToLoad
from patchpar.pipeline.planner.forecast import Forecast, PhaseForecast
from patchpar.pipeline.planner.kept_searches import searched
from patchpar.pipeline.planner.overlap import leaves_overlap_open, overlap_of
from patchpar.pipeline.planner.search import PlanSearchResult
from patchpar.pipeline.planner.simulate import GRAPHS, Simulator
from patchpar.pipeline.planner.tape_recorder import DECODE
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from patchpar.plan.replay.measured_machine import MeasuredMachine
from patchpar.plan.scalars import is_whole

PLANNED = ("height", "width", "num_frames", "guidance_scale", "true_cfg_scale", "negative_prompt")
"""Arguments that a forecast depends on."""
CALLBACK = "callback_on_step_end"
WITHOUT_EFFECT = (
    *("prompt", "generator", "output_type", "return_dict", "num_inference_steps"),
    *(CALLBACK, f"{CALLBACK}_tensor_inputs"),
)
OFF = 0.25
"""A call that takes more or less than its forecast by this much is off."""
OTHERS = 3
NOTHING = PhaseForecast(seconds=0.0, compute=0.0, launch=0.0, exposed={})
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """The plan of a call that was not made, why, its forecast, and the forecasts of the runners-up."""

    plan: Plan
    reason: str
    forecast: Forecast
    others: tuple[Forecast, ...]


class TimedPlans:
    """Forecasts of calls of one model, loaded from `folder` with `options`, on these devices.

    `kept`: where measurements are; without one of these devices, and for a model that is in memory or on the hub, no
    call has a forecast.
    """

    def __init__(
        self,
        folder: str | None,
        options: Mapping[str, Any],
        devices: Sequence[str],
        kept: KeptMachines | None = None,
    ) -> None:
        self._folder, self._devices = folder, tuple(devices)
        self._options = {name: _named(value) for name, value in options.items()}
        self._kept = kept or KeptMachines.in_home()
        self._found: dict[str, PlanSearchResult | PlanError] = {}
        self._overlaps: dict[tuple[str, Plan, tuple[int, ...]], PlanChoice | None] = {}
        self._called: set[tuple[str, Plan]] = set()
        self._ratios: list[float] = []
        self._searching = threading.Lock()  # calls that are alike are searched once, and searches come in turn
        change_in_children(self)

    def after_fork(self) -> None:
        """Let a forked child search, whatever another thread of its parent did."""
        self._searching = threading.Lock()

    @classmethod
    def of(cls, model: ModelToLoad, devices: Sequence[str], graphs: bool | str | None) -> "TimedPlans":
        """Return those of a model before it is loaded. `graphs`: the option of its pipeline."""
        if isinstance(model, ModelInFiles) and Path(model.source).is_dir():
            return cls(str(model.source), {**model.options, GRAPHS: graphs}, devices)
        return cls(None, {}, devices)

    @property
    def machine(self) -> MeasuredMachine | None:
        """The measurement of the devices; None without one."""
        return None if self._folder is None else self._kept.find(self._devices)

    def better(self, choice: PlanChoice, model: PipelineInfo, kwargs: Mapping[str, Any]) -> PlanChoice:
        """Return the choice with the plan of the shortest predicted step, if there is a forecast of such a call."""
        plain = choice.plan.data == 1 and choice.plan.weights == "whole" and str(choice.plan.strategy) == "exact"
        if not plain or len(self._devices) == 1 or _call_of(kwargs) is None:
            return choice
        if self.machine is None:
            return choice
        try:
            found = self._searched(model, kwargs)
            best, order = found.best.plan, found.best.order
        except PlanError as error:
            return replace(choice, reason=f"{choice.reason}; no forecast: {error}")
        if best.patch > 1 and not (model.splits_into_bands or model.splits_into_tokens):
            return choice
        return replace(choice, plan=best, reason=_reason(found), ranks=order[: best.world_size])

    def overlapped(self, plan: Plan, ranks: tuple[int, ...], kwargs: Mapping[str, Any]) -> PlanChoice | None:
        """Return a plan that was asked for with `overlap` as the links between its ranks are; see `overlap_of`.

        None where that is not open, and where there is no forecast: a CPU's messages take the core that computes. What
        has been decided stays, whatever is measured later: the same call has the same bits as long as there is this.
        """
        call = _call_of(kwargs)
        if self._folder is None or call is None or not leaves_overlap_open(plan):
            return None
        key = _key(call), plan, ranks
        with self._searching:
            if key not in self._overlaps:
                self._overlaps[key] = self._overlap(plan, ranks, call)
            return self._overlaps[key]

    def _overlap(self, plan: Plan, ranks: tuple[int, ...], call: Mapping[str, Any]) -> PlanChoice | None:
        machine = self.machine
        if self._folder is None or machine is None or not machine.device.beside_host:
            return None
        try:
            return overlap_of(plan, ranks, Simulator(self._folder, machine, self._options, dict(call)).of)
        except PlanError:  # it cannot be recorded: the plan stays as it was asked for
            return None

    def planned(self, model: PipelineInfo, kwargs: Mapping[str, Any]) -> PlannedCall:
        """Return the plan of a call. Raises PlanError without a measurement, and for a call without a forecast."""
        if self._folder is None:
            raise PlanError("planned() needs a model that is loaded from a folder: use from_pretrained with a folder")
        self._kept.of(self._devices)
        if _call_of(kwargs) is None:
            known = (*PLANNED, *WITHOUT_EFFECT)
            names = [name for name, value in kwargs.items() if value is not None and name not in known]
            what = ", ".join(names) or "another prompt than one text"
            raise PlanError(f"a call with {what} has no forecast: use one prompt, and only {', '.join(PLANNED)}")
        found = self._searched(model, kwargs)
        best = _with_steps(found.best, kwargs)
        return PlannedCall(
            plan=best.plan,
            reason=_reason(found),
            forecast=best,
            others=tuple(each for each in found.ranked if each.plan != best.plan)[:OTHERS],
        )

    def compared(self, run: Run, kwargs: Mapping[str, Any], busy: float | None) -> Run:
        """Return the statistics of a call with its forecast for the steps that it has made. It knows of no callback.

        `busy`: seconds that its ranks took, without the wait for them; None of a call that no forecast is of, see
        CallOptions. A first call, which also verifies, corrects nothing.
        """
        if kwargs.get(CALLBACK) is not None:
            return run
        found = self._found.get(_key(_call_of(kwargs)))
        ranked = found.ranked if isinstance(found, PlanSearchResult) else ()
        forecast = next((each for each in ranked if each.plan == run.plan), None)
        if forecast is None:
            return run
        if kwargs.get("output_type") == "latent":
            forecast = replace(forecast, phases={**forecast.phases, DECODE: NOTHING})
        steps = {"num_inference_steps": run.steps} if run.steps else kwargs  # a scheduler may take more than it is told
        seconds, call = _with_steps(forecast, steps).seconds, (_key(_call_of(kwargs)), run.plan)
        if call in self._called and busy is not None:
            self._correct(busy / seconds)
        self._called.add(call)
        return replace(run, forecast=seconds)

    def _correct(self, ratio: float) -> None:
        """Scale the measurement where two calls in a row were off in the same direction."""
        is_off = abs(ratio - 1) > OFF
        same = self._ratios and (self._ratios[-1] > 1) == (ratio > 1)
        self._ratios = [*(self._ratios if same else []), ratio] if is_off else []
        if len(self._ratios) == 2:
            factor = sum(self._ratios) / 2
            log.warning("two calls took %.2f times their forecast: measured kernels are scaled by it", factor)
            self._kept.scale(self._devices, factor)
            self._ratios, self._found = [], {}

    def _searched(self, model: PipelineInfo, kwargs: Mapping[str, Any]) -> PlanSearchResult:
        """Return the plans of such a call. Raises PlanError, again without another search."""
        call = _call_of(kwargs)
        key = _key(call)
        with self._searching:
            known = self._found  # read before the machine: a correction meanwhile begins another one
            if key not in known:
                known[key] = self._search(model.branches(kwargs), call or {})
            found = known[key]
        if isinstance(found, PlanError):
            raise found
        return found

    def _search(self, branches: int, call: Mapping[str, Any]) -> PlanSearchResult | PlanError:
        assert self._folder is not None
        try:
            machine = self._kept.of(self._devices)
            simulator = Simulator(self._folder, machine, self._options, dict(call))
            return searched(simulator, branches, "exact", in_order=True)
        except PlanError as error:
            return error


def _call_of(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments that a forecast depends on; None for a call with others, or with several prompts."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    if any(name not in (*PLANNED, *WITHOUT_EFFECT) for name in given) or not isinstance(given.get("prompt"), str):
        return None
    return {name: given[name] for name in PLANNED if name in given}


def _named(option: Any) -> Any:
    """Return a dtype of torch by its name, so that tapes are found again; any other option as it is."""
    return str(option).removeprefix("torch.") if type(option).__name__ == "dtype" else option


def _key(call: Mapping[str, Any] | None) -> str:
    return json.dumps(call, sort_keys=True, default=str)


def _with_steps(found: Forecast, kwargs: Mapping[str, Any]) -> Forecast:
    steps = kwargs.get("num_inference_steps")
    return replace(found, steps=steps) if is_whole(steps) else found


def _reason(found: PlanSearchResult) -> str:
    times = [f"{each.plan} {1e3 * each.step.seconds:.3g} ms" for each in found.ranked[: 1 + OTHERS]]
    return f"predicted step on this machine, as measured: {', '.join(times)}"
