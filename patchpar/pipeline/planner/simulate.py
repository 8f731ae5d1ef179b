"""Simulate a call of a model folder under a plan on a machine by name. No weights, and none of its devices, are needed.

simulate("./flux", "8xH100-nvlink", "patch=8", height=1024, width=1024).step.seconds
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.dry_run.empty_pipeline import empty_pipeline
from patchpar.models.dry_run.meta_mode import KnownForms
from patchpar.models.files import EMBEDDED, embedded_model
from patchpar.models.info import describe, parameters_of
from patchpar.pipeline.planner.forecast import Forecast, forecast, plan_fits
from patchpar.pipeline.planner.image_ranks import ranks_of_image
from patchpar.pipeline.planner.record import Recording, RecordOptions
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED
from patchpar.strategies.structure.options import StructureGuidance

PROMPT = "a photo"
GRAPHS = "graphs"
EXACT_STEPS, STALE_STEPS = 2, 4
"""Steps that are recorded: of the last, all later ones are like it. Stale values of two steps are known after three."""


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
                "strategy structure gives each rank other work in each step, so that no step is like all others: "
                "simulate another strategy, such as exact"
            )
        if not plan.strategy.policy.remembers or plan.patch == 1:
            return cls(plan=plan, recorded=EXACT_STEPS, warm_up_steps=0)
        warm_up = plan.strategy.policy.warmup_steps
        short = replace(plan, strategy=replace(plan.strategy, warmup_steps=1))
        return cls(plan=short, recorded=STALE_STEPS, warm_up_steps=warm_up)


class Simulator:
    """Calls of one model with `kwargs` on one machine, under any plans. `options`: see `simulate`.

    Raises PlanError for a model or a machine that is not known, UnsupportedModel for a quantised model.
    """

    def __init__(
        self, model: str, machine: str | Machine, options: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.machine = Machine.parse(machine) if isinstance(machine, str) else machine
        loading = {name: value for name, value in options.items() if name != GRAPHS}
        self._assumed = AS_GRAPH if options.get(GRAPHS) else ASSUMED
        self._pipe: Any = empty_pipeline(*_folder(model, loading))
        self._pipe.set_progress_bar_config(disable=True)
        self._kwargs, self._known = dict(kwargs), KnownForms()

    @property
    def branches(self) -> int:
        """The number of guidance branches of the call."""
        return describe(self._pipe).branches(self._kwargs)

    def of(self, plan: Plan) -> Forecast:
        """Return the forecast of a call under a plan. With data=N it has N prompts.

        Raises PlanError, and UnsupportedModel where it cannot be recorded.
        """
        plan_fits(plan, self.machine)
        steps, pipe = SimulatedSteps.of(plan), self._pipe
        kwargs = {"prompt": [PROMPT] * plan.data if plan.data > 1 else PROMPT} | self._kwargs
        number = kwargs.get("num_inference_steps") or parameters_of(type(pipe)).get("num_inference_steps") or 1
        options = RecordOptions(steps=steps.recorded, joined=True, known=self._known)
        ranks = ranks_of_image(steps.plan, Recording(pipe, steps.plan, kwargs, options).of_rank)
        found = forecast(
            ranks, steps.plan, self.machine, steps=number, warm_up_steps=steps.warm_up_steps, assumed=self._assumed
        )
        return replace(found, plan=plan)


def simulate(
    model: str, machine: str | Machine, plan: str | Plan, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Forecast:
    """Return the forecast of a call with `kwargs`. `options`: of `from_pretrained`; with `graphs` a step is one launch.

    Raises what `Simulator` raises.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    return Simulator(model, machine, options or {}, kwargs).of(plan)


def _folder(model: str, options: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a model and its options. Raises PlanError for one that is not here."""
    if model in EMBEDDED:
        return embedded_model(model), {"variant": "fp16", "torch_dtype": "float32", **options}
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise PlanError(
            f"{model!r} is no folder here: give one of {', '.join(EMBEDDED)}, or a folder with the configurations of a "
            f"model, without its weights: huggingface-cli download {model} --exclude '*.safetensors' --local-dir DIR"
        )
    return folder, dict(options)
