"""Simulate a call of a model folder under a plan on a machine by name. No weights, and none of its devices, are needed.

simulate("./flux", "8xH100-nvlink", "patch=8", height=1024, width=1024).step.seconds
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.dry_run.empty_pipeline import empty_pipeline
from patchpar.models.files import EMBEDDED, embedded_model
from patchpar.models.info import parameters_of
from patchpar.pipeline.planner.forecast import Forecast, forecast, plan_fits
from patchpar.pipeline.planner.image_ranks import ranks_of_image
from patchpar.pipeline.planner.record import Recording, RecordOptions
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED
from patchpar.strategies.structure.options import StructureGuidance

PROMPT = "a photo"
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


def simulate(
    model: str, machine: str | Machine, plan: str | Plan, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Forecast:
    """Return the forecast of a call with `kwargs`. `options`: of `from_pretrained`, and `graphs`, see `RecordedAs`.

    A plan with data=N gets N prompts. Raises PlanError, and UnsupportedModel where a call cannot be recorded.
    """
    found = dict(options or {})
    assumed = AS_GRAPH if found.pop("graphs", False) else ASSUMED
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    machine = Machine.parse(machine) if isinstance(machine, str) else machine
    plan_fits(plan, machine)
    steps = SimulatedSteps.of(plan)
    pipe = empty_pipeline(*_folder(model, found))
    pipe.set_progress_bar_config(disable=True)
    prompts = {"prompt": [PROMPT] * plan.data if plan.data > 1 else PROMPT}
    number = kwargs.get("num_inference_steps") or parameters_of(type(pipe)).get("num_inference_steps") or 1
    recording = Recording(pipe, steps.plan, prompts | kwargs, RecordOptions(steps=steps.recorded, joined=True))
    ranks = ranks_of_image(steps.plan, recording.of_rank)
    found_forecast = forecast(
        ranks, steps.plan, machine, steps=number, warm_up_steps=steps.warm_up_steps, assumed=assumed
    )
    return replace(found_forecast, plan=plan)


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
