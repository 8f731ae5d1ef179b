"""Predictions are merged after guidance, at the scheduler's step: one combined prediction is sent, not every branch.

    first step    the denoiser returns the whole prediction; the guidance of the pipeline is measured on it
    later steps   it returns this rank's partial prediction, NaN elsewhere; the pipeline combines its branches, and
                  the result is completed before the scheduler gets it
    with windows  it is completed only where this rank needs it; elsewhere the latents become NaN
    last step     latents are completed

This is correct where guidance is a mean of the branches with the same weights everywhere, which the first step shows.
Guidance that depends on the whole prediction (guidance_rescale) keeps whole predictions in every step. So do calls
whose latents are read between the steps, and pipelines that are not known to treat each position independently.
"""

from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm
from patchpar.errors import UnsupportedModel
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.scheduler_step import Step, WithinSteps, sample_in, with_sample
from patchpar.strategies.structure.guidance_fit import GuidanceFit
from patchpar.strategies.structure.native_size import is_position_independent
from patchpar.strategies.structure.needed_regions import NeededRegions
from patchpar.strategies.structure.partial_prediction import PartialPrediction
from patchpar.strategies.structure.patch_inputs import PatchInputs
from patchpar.strategies.structure.prediction_merge import PredictionMerge

NOT_ALIKE = (
    "each rank holds only the latents that it needs, but this pipeline uses others: pass any callback_on_step_end, "
    "with which every rank holds all, or use one device. If one device gives NaN too, the model itself predicts NaN"
)


class AfterGuidance(WithinSteps):
    """The merge after guidance on one rank, from `begin` to `end`. `parted`: latents are NaN where it needs none."""

    def __init__(self, mesh: AxisComm, clock: StepClock, pipe: Any) -> None:
        self._mesh, self._clock, self._pipe = mesh, clock, pipe
        self._forget()

    def _forget(self) -> None:
        self._is_mean: bool | None = None  # None before the first step
        self._layout: PatchInputs | None = None
        self._seen: list[Tensor] = []  # predictions returned to the pipeline in this step, by branch
        self._waiting: list[PartialPrediction] = []
        self._watched = False
        self.parted = False
        self._ends = False  # this is the last step
        self._ended_at: int | None = None

    def begin(self, scheduler: Any, *, watched: bool = False) -> None:
        """Replace `scheduler.step` by one that completes predictions first; call it after other overrides.

        `watched`: latents are read between the steps, so that they are complete in each.
        """
        self.end()
        self._watched = watched
        if self._mesh[1].size == 1:
            return

        def stepped(step: Step, model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._ended(step(self._completed(model_output), *args, **kwargs))

        self._override(scheduler, stepped)

    def end(self) -> None:
        """Restore `scheduler.step` and forget the image."""
        super().end()
        self._forget()

    def takes(self, partial_prediction: PartialPrediction) -> bool:
        """Whether the merge of a partial prediction can wait until after guidance."""
        return self._is_mean is True and partial_prediction.can_wait

    def answered(self, layout: PatchInputs, whole_BCHW: Tensor, branches: int) -> None:
        """Note that the pipeline gets the whole prediction whole_BCHW, all `branches` in its batch."""
        if self._scheduler is not None and self._is_mean is None:
            self._layout = layout
            self._seen += whole_BCHW.chunk(branches)

    def put_off(self, layout: PatchInputs, partial_prediction: PartialPrediction) -> Tensor:
        """Keep a partial prediction for the merge; return it as x_BCHW, NaN where it is not this rank's.

        Raises UnsupportedModel where a rank has other patches than in an earlier call of the step.
        """
        if self._waiting and self._waiting[0].assignment != partial_prediction.assignment:
            raise UnsupportedModel(
                f"step {self._clock.evaluation} has calls of {self._waiting[0].branches} and of "
                f"{partial_prediction.branches} guidance branches, of which ranks have other patches: use one device"
            )
        self._layout = layout
        self._waiting.append(partial_prediction)
        return partial_prediction.image_BCHW

    def _completed(self, model_output: Tensor) -> Tensor:
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
                f"guidance at {where} is no weighted mean of its branches, as it was in the first step: keep "
                "guidance_rescale constant within an image, or use one device"
            )
        return layout.output(model_output, last.finish(whole).to(model_output.dtype))

    def _regions(self, partial_prediction: PartialPrediction) -> NeededRegions | None:
        """Return where ranks need this step's prediction; None for everywhere. The same on all ranks."""
        steps = getattr(self._pipe, "_num_timesteps", None)
        if partial_prediction.regions is None or self._watched or not is_position_independent(self._pipe):
            return None
        if self._ended_at is not None:
            raise UnsupportedModel(f"the pipeline continues after step {self._ended_at}, its last one: {NOT_ALIKE}")
        if not isinstance(steps, int) or self._clock.evaluation >= steps:
            return None
        self.parted, self._ends = True, self._clock.evaluation == steps - 1
        return partial_prediction.regions(self._ends)

    def _ended(self, result: Any) -> Any:
        """Return the result of a scheduler step, in the last step with completed latents."""
        if not self._ends or self._layout is None:
            return result
        self.parted = self._ends = False
        self._ended_at = self._clock.evaluation
        sample, layout = sample_in(result), self._layout
        own_BCHW = layout.map_of(sample, (layout.x_BCHW.shape[-2], layout.x_BCHW.shape[-1]))
        whole_BCHW = PredictionMerge(self._mesh, "the last step").latents(own_BCHW)
        if whole_BCHW.isnan().any():
            raise UnsupportedModel(f"after the last step latents are NaN: {NOT_ALIKE}")
        return with_sample(result, layout.output(sample, whole_BCHW).to(sample.dtype))

    def check_whole(self) -> None:
        """Raise UnsupportedModel at the end of an image whose latents were never completed."""
        if self.parted:
            raise UnsupportedModel(f"the pipeline ended before the last of its steps: {NOT_ALIKE}")
