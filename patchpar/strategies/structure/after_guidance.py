"""Ranks meet after guidance: where the scheduler steps, the pipeline's branches are one, and so is what is sent.

    first step    the denoiser answers with the whole; what the pipeline makes of it is looked at
    later steps   it answers with this rank's portion, with no number elsewhere; the pipeline puts its branches
                  together as ever, and before the scheduler sees the result, it is made whole
    with windows  it is made whole only where this rank needs it; elsewhere its latents become no number
    last step     latents are made whole

That is right where guidance is a mean of the branches with the same weights everywhere, which the first step shows.
Guidance that depends on the whole prediction (guidance_rescale) goes on with the whole. So do latents that somebody
looks at between the steps, and pipelines that are not known to treat every place of them by itself.
"""

from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.scheduler_step import SchedulerStepOverride, Step
from patchpar.strategies.structure.guidance_fit import GuidanceFit
from patchpar.strategies.structure.needed_regions import NeededRegions
from patchpar.strategies.structure.partial_prediction import PartialPrediction
from patchpar.strategies.structure.patch_inputs import PatchInputs
from patchpar.strategies.structure.prediction_merge import PredictionMerge
from patchpar.strategies.structure.step_output import sample_in, with_sample
from patchpar.strategies.structure.supported_pipelines import is_position_independent

NOT_ALIKE = (
    "ranks hold only those latents that they need, and this pipeline needs others; with any callback_on_step_end they "
    "hold all, and one device does too. Or the model itself predicts no number: then so it does there"
)


class AfterGuidance:
    """One picture after the other on one rank. `begin` belongs before each, `end` after it.

    `parted`: latents are no number where this rank needs none.
    """

    def __init__(self, mesh: tuple[Communicator, Axis], clock: StepClock, pipe: Any) -> None:
        self._mesh, self._clock, self._pipe = mesh, clock, pipe
        self._scheduler: Any = None
        self._forget()

    def _forget(self) -> None:
        self._is_mean: bool | None = None  # None until a step has shown it
        self._layout: PatchInputs | None = None
        self._seen: list[Tensor] = []  # what the pipeline was answered with in this step, by branches
        self._waiting: list[PartialPrediction] = []
        self._watched = False
        self.parted = False
        self._ends = False  # this is the last step
        self._ended_at: int | None = None

    def begin(self, scheduler: Any, *, watched: bool = False) -> None:
        """Stand before everything else that stands before the scheduler's step.

        `watched`: somebody looks at the latents between the steps, so that they are whole in each.
        """
        self.end()
        self._watched = watched
        if self._mesh[1].size == 1:
            return
        self._scheduler = scheduler

        def stepped(step: Step, model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._ended(step(self._made_whole(model_output), *args, **kwargs))

        scheduler.step = SchedulerStepOverride(scheduler, stepped)

    def end(self) -> None:
        """Stand aside, and forget."""
        if self._scheduler is not None:
            vars(self._scheduler).pop("step", None)
        self._scheduler = None
        self._forget()

    def takes(self, partial_prediction: PartialPrediction) -> bool:
        """Whether a portion can be put off, rather than be made whole at once."""
        return self._is_mean is True and partial_prediction.can_wait

    def answered(self, layout: PatchInputs, whole_BCHW: Tensor, branches: int) -> None:
        """The pipeline gets the whole."""
        if self._scheduler is not None and self._is_mean is None:
            self._layout = layout
            self._seen += whole_BCHW.chunk(branches)

    def put_off(self, layout: PatchInputs, partial_prediction: PartialPrediction) -> Tensor:
        """What the pipeline gets instead of the whole."""
        self._layout = layout
        self._waiting.append(partial_prediction)
        return partial_prediction.image_BCHW

    def _made_whole(self, model_output: Tensor) -> Tensor:
        if self._layout is None or not (self._seen or self._waiting):
            return model_output
        layout, waiting, seen = self._layout, self._waiting, self._seen
        self._seen, self._waiting = [], []
        combined = layout.map_of(model_output, (layout.x_BCHW.shape[-2], layout.x_BCHW.shape[-1]))
        if not waiting:
            branches = torch.stack([x[:, : combined.shape[1]] for x in seen])
            self._is_mean = combined.shape == branches.shape[1:] and GuidanceFit.of(combined, branches).is_mean
            return model_output
        where, last = f"step {self._clock.evaluation}", waiting[-1]
        whole = PredictionMerge(self._mesh, where).after_guidance(
            waiting, last.canvas_of(combined), self._regions(last)
        )
        if whole is None:
            raise UnsupportedModel(
                f"guidance at {where} is no mean of its branches, as it was in the first step: keep guidance_rescale "
                "as it is within a picture, or use one device"
            )
        answer: Tensor = layout.output(model_output, last.finish(whole).to(model_output.dtype))
        return answer

    def _regions(self, partial_prediction: PartialPrediction) -> NeededRegions | None:
        """Where ranks need what this step answers; None for everywhere. All ranks find the same."""
        steps = getattr(self._pipe, "_num_timesteps", None)
        if partial_prediction.regions is None or self._watched or not is_position_independent(self._pipe):
            return None
        if self._ended_at is not None:
            raise UnsupportedModel(f"the pipeline goes on after step {self._ended_at}, its last one: {NOT_ALIKE}")
        if not isinstance(steps, int) or self._clock.evaluation >= steps:
            return None
        self.parted, self._ends = True, self._clock.evaluation == steps - 1
        return partial_prediction.regions(self._ends)

    def _ended(self, result: Any) -> Any:
        """What a step of the scheduler returns; in the last one with latents that are whole again."""
        if not self._ends or self._layout is None:
            return result
        self.parted = self._ends = False
        self._ended_at = self._clock.evaluation
        sample, layout = sample_in(result), self._layout
        own_BCHW = layout.map_of(sample, (layout.x_BCHW.shape[-2], layout.x_BCHW.shape[-1]))
        whole_BCHW = PredictionMerge(self._mesh, "the last step").latents(own_BCHW)
        if whole_BCHW.isnan().any():
            raise UnsupportedModel(f"after the last step latents are no number: {NOT_ALIKE}")
        return with_sample(result, layout.output(sample, whole_BCHW).to(sample.dtype))

    def check_whole(self) -> None:
        """At the end of a picture: raise UnsupportedModel where its latents were never made whole."""
        if self.parted:
            raise UnsupportedModel(f"the pipeline ended before the last of its steps: {NOT_ALIKE}")
