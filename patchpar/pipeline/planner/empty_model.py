"""A model without weights, of which calls are recorded under plans. All plans share its networks and what is learnt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchpar.models.call_parameters import parameters_of
from patchpar.models.dry_run.empty_pipeline import empty_pipeline
from patchpar.models.info import describe
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.models.task import ANY_PROMPT
from patchpar.pipeline.planner.image_ranks import ImageRanks, ranks_of_image
from patchpar.pipeline.planner.kept_tapes import CallFacts
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.plan.plan import Plan


class EmptyModel:
    """The pipeline of a folder, loaded with `options`, and its call with `kwargs`. `joined`: see RecordOptions.

    Raises PlanError for a folder without a model, UnsupportedModel for a quantised one.
    """

    def __init__(
        self, folder: Path, options: Mapping[str, Any], kwargs: Mapping[str, Any], *, joined: bool = True
    ) -> None:
        silence_libraries()
        self._pipe: Any = empty_pipeline(folder, options)
        self._pipe.set_progress_bar_config(disable=True)
        self._kwargs, self._learnt = dict(kwargs), RecordOptions(joined=joined)

    @property
    def call(self) -> CallFacts:
        """What the planner has to know of the call."""
        given, default = self._kwargs.get("num_inference_steps"), parameters_of(type(self._pipe))
        steps, scheduler = given or default.get("num_inference_steps") or 1, getattr(self._pipe, "scheduler", None)
        order = getattr(scheduler, "order", 1)  # calls of the denoiser in each step but one
        return CallFacts(branches=describe(self._pipe).branches(self._kwargs), steps=order * steps - (order - 1))

    def ranks(self, plan: Plan, steps: int) -> ImageRanks:
        """Return the ranks of the first image under a plan, in so many steps. With data=N the call has N prompts.

        Raises PlanError, and UnsupportedModel where it cannot be recorded.
        """
        kwargs = {"prompt": [ANY_PROMPT] * plan.data if plan.data > 1 else ANY_PROMPT} | self._kwargs
        recording = Recording(self._pipe, plan, kwargs, self._learnt.with_steps(steps))
        return ranks_of_image(plan, recording.of_rank)
