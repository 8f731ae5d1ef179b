"""A model without weights, of which calls are recorded under plans. All plans share its networks and what is learnt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.call_parameters import parameters_of
from patchpar.models.dry_run.empty_pipeline import empty_pipeline
from patchpar.models.info import describe
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.models.task import ANY_PROMPT, purpose_of
from patchpar.pipeline.planner.derived_ranks import LoggedRanks
from patchpar.pipeline.planner.image_ranks import ImageRanks
from patchpar.pipeline.planner.kept_tapes import CallFacts
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.plan.plan import Plan


class EmptyModel:
    """The pipeline of a folder, loaded with `options`, and its call with `kwargs`. `joined`: see RecordOptions.

    Raises PlanError for a folder without a model, and a call that needs more; UnsupportedModel for a quantised model.
    """

    def __init__(
        self, folder: Path, options: Mapping[str, Any], kwargs: Mapping[str, Any], *, joined: bool = True
    ) -> None:
        silence_libraries()
        self._pipe: Any = empty_pipeline(folder, options)
        self._pipe.set_progress_bar_config(disable=True)
        kind, self._parameters = type(self._pipe).__name__, parameters_of(type(self._pipe))
        needed = [name for name in getattr(purpose_of(kind), "needed", ()) if name not in kwargs]
        if needed:
            raise PlanError(
                f"this model is a {kind}, whose call needs {' and '.join(needed)}, of which a command knows nothing: "
                f"in Python, simulate(model, machine, plan, {needed[0]}=...) takes what the call takes"
            )
        self._kwargs, self._learnt, self._logged = dict(kwargs), RecordOptions(joined=joined), LoggedRanks()

    @property
    def call(self) -> CallFacts:
        """What the planner has to know of the call."""
        given, scheduler = self._kwargs.get("num_inference_steps"), getattr(self._pipe, "scheduler", None)
        steps = given or self._parameters.get("num_inference_steps") or 1
        order = getattr(scheduler, "order", 1)  # calls of the denoiser in each step but one
        return CallFacts(branches=describe(self._pipe).branches(self._kwargs), steps=order * steps - (order - 1))

    def ranks(self, plan: Plan, steps: int) -> ImageRanks:
        """Return the ranks of the first image under a plan, in so many steps. With data=N the call has N prompts.

        Raises PlanError, and UnsupportedModel where it cannot be recorded.
        """
        prompt = {"prompt": [ANY_PROMPT] * plan.data if plan.data > 1 else ANY_PROMPT}
        kwargs = (prompt if "prompt" in self._parameters else {}) | self._kwargs
        return Recording(self._pipe, plan, kwargs, self._learnt.with_steps(steps), self._logged).of_image()
