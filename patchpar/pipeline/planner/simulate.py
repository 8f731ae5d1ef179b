"""Simulate a call of a model folder under a plan on a machine by name. No weights, and none of its devices, are needed.

simulate("./flux", "8xH100-nvlink", "patch=8", height=1024, width=1024).step.seconds
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.launch.devices import resolve_devices
from patchpar.models.files import EMBEDDED, HUB_NAME, embedded_model, path_of
from patchpar.models.quick_imports import quick_imports
from patchpar.pipeline.graph_option import are_wanted, why_no_graphs
from patchpar.pipeline.planner.forecast import AnyMachine, Forecast, PlanForecasts, plan_fits, steps_of_turn
from patchpar.pipeline.planner.image_ranks import ImageRanks
from patchpar.pipeline.planner.kept_tapes import CallFacts, KeptTapes
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_device import MeasuredDevice
from patchpar.plan.replay.measured_machine import MeasuredMachine
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.structure.options import StructureGuidance

if TYPE_CHECKING:
    from patchpar.pipeline.planner.empty_model import EmptyModel

GRAPHS = "graphs"
LOCAL = "local"
"""The name of this machine, as it was measured."""
SEVERAL = Plan(cfg=2)
"""A plan of several ranks, whatever the call."""
EXACT_STEPS, DIVIDED_STEPS, STALE_STEPS = 1, 2, 4
"""Steps that are recorded: of the last, all later ones are like it. Stale values of two steps are known after three.
The first block of divided weights comes while the step before ends.

Where layers are refreshed in turn, as many more as it takes until all have been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    """The plan as it is recorded, and how many of the steps of its first kind the call really has."""

    plan: Plan
    recorded: int
    warm_up_steps: int

    @classmethod
    def of(cls, plan: Plan) -> "SimulatedSteps":
        """Return those of a plan, with one exact step. Raises UnsupportedModel for structure guidance."""
        if isinstance(plan.strategy, StructureGuidance):
            raise UnsupportedModel(
                "strategy structure gives each rank other work in each step, so that a recorded step does not stand "
                "for the others: simulate another strategy, such as exact"
            )
        if not plan.strategy.policy.remembers or plan.patch == 1:
            steps = EXACT_STEPS if plan.weights == "whole" else DIVIDED_STEPS
            return cls(plan=plan, recorded=steps, warm_up_steps=0)
        warm_up = plan.strategy.policy.warmup_steps
        short = replace(plan, strategy=replace(plan.strategy, warmup_steps=1))
        return cls(plan=short, recorded=STALE_STEPS - 1 + steps_of_turn(plan), warm_up_steps=warm_up)


class Simulator:
    """Calls of one model with `kwargs` on one machine, under any plans. `options`: see `simulate`. `files`: kept tapes.

    A plan that is kept is not recorded again, and then neither torch nor diffusers is imported. `fresh`: see
    `KeptTapes`. Raises PlanError for a model or a machine that is not known.
    """

    def __init__(
        self,
        model: str,
        machine: str | AnyMachine,
        options: Mapping[str, Any],
        kwargs: Mapping[str, Any],
        files: VerificationCache | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self.machine = machine_of(machine) if isinstance(machine, str) else machine
        loading = {name: value for name, value in options.items() if name != GRAPHS}
        self._graphs = options.get(GRAPHS)
        self._folder, self._options = _folder(model, loading)
        self._kwargs = dict(kwargs)
        device = self.machine.device
        self._joined = not isinstance(device, MeasuredDevice) or device.beside_host
        facts = {"joined": self._joined}
        self._forecasts: dict[Plan, PlanForecasts] = {}
        self._tapes = KeptTapes.of(self._folder, self._options, self._kwargs, facts=facts, files=files, fresh=fresh)

    @cached_property
    def call(self) -> CallFacts:
        """What is known of the call. Raises PlanError, UnsupportedModel for a quantised model."""
        found = self._tapes.call()
        if found is None:
            found = self._model.call
            self._tapes.keep_call(found)
        return found

    @property
    def kept(self) -> KeptTapes:
        """Where anything is kept that depends on its forecasts: on the machine too, with its rates and links."""
        return self._tapes.with_facts(machine=repr(self.machine), graphs=self._graphs)

    @cached_property
    def _model(self) -> "EmptyModel":
        with quick_imports():
            from patchpar.pipeline.planner.empty_model import EmptyModel  # imports diffusers, which takes seconds

            return EmptyModel(self._folder, self._options, self._kwargs, joined=self._joined)

    def of(self, plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        """Return the forecast of a call under a plan. With data=N it has N prompts. `order`: the device of each rank.

        Raises PlanError, and UnsupportedModel where it cannot be recorded.
        """
        if plan not in self._forecasts:
            plan_fits(plan, self.machine)
            steps = SimulatedSteps.of(plan)
            self._forecasts[plan] = PlanForecasts(
                self._ranks(steps),
                steps.plan,
                self.machine,
                steps=self.call.steps,
                warm_up_steps=steps.warm_up_steps,
                assumed=AS_GRAPH if self._is_captured(plan) else ASSUMED,
            )
        found = replace(self._forecasts[plan].on(order), plan=plan)
        if plan.world_size == 1 and self._is_captured(SEVERAL):
            return replace(found, launching=0.0)  # plans of several ranks do not launch as this one does
        return found

    def _is_captured(self, plan: Plan) -> bool:
        """Whether steps of a plan run as graphs, by the option of a pipeline."""
        return self._joined and are_wanted(self._graphs, plan) and not why_no_graphs(plan)

    def _ranks(self, steps: SimulatedSteps) -> ImageRanks:
        found = self._tapes.find(steps.plan)
        if found is None:
            try:
                with quick_imports():
                    found = self._model.ranks(steps.plan, steps.recorded)
            except PlanError as error:
                found = error
            self._tapes.keep(steps.plan, found)
        if isinstance(found, PlanError):
            raise found
        return found


def simulate(
    model: str, machine: str | AnyMachine, plan: str | Plan, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Forecast:
    """Return the forecast of a call with `kwargs`. `options`: of `from_pretrained`, also `graphs`, as of a pipeline.

    Raises what `Simulator` raises.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    return Simulator(model, machine, options or {}, kwargs).of(plan)


def _folder(model: str, options: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a model and its options. Raises PlanError for one that is not here."""
    if model in EMBEDDED:
        return embedded_model(model), {"variant": "fp16", "torch_dtype": "float32", **options}
    folder = path_of(model)
    if not folder.is_dir():
        fetch = f": hf download {model} --exclude '*.safetensors' --local-dir DIR" if HUB_NAME.fullmatch(model) else ""
        raise PlanError(
            f"{model!r} is no model, and no such folder is here: give one of {', '.join(EMBEDDED)}, or a folder with "
            f"the configurations of a model, without its weights{fetch}"
        )
    return folder, dict(options)


def machine_of(text: str) -> Machine | MeasuredMachine:
    """Return the machine of "8xH100-nvlink", or of "local" and "local:cpu:2", which `patchpar tune` has measured.

    Raises PlanError for a name that cannot be read, and for devices that were not measured.
    """
    name, _, devices = text.strip().partition(":")
    if name != LOCAL and get_close_matches(name.lower(), [LOCAL], cutoff=0.75):
        raise PlanError(
            f"machine {text!r} cannot be read, the nearest is {LOCAL}: this machine, as tune has measured it"
        )
    if name != LOCAL:
        return Machine.parse(text)
    return KeptMachines.in_home().of(resolve_devices(devices or "auto").names)
