"""The guide of a cascade: the picture at native size, which goes on by itself beside the large one.

    time        1 ... switch                     ... 0
    large       led by its anchor                windows, kept in place by the guide
    guide       is the anchor                    a latent of its own, one evaluation a step beside the windows

The anchor of a large latent holds ever finer detail, sampled too sparsely to be a picture; the guide stays the picture
that the model draws at native size. It takes a deterministic step of its own (DDIM, arXiv 2010.02502) wherever the
pipeline's scheduler takes one, with the same weights of the guidance branches, which are found by comparison.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.strategies.scheduler_step import SchedulerStepOverride, Step
from patchpar.strategies.structure.guidance_fit import GuidanceFit, weighed
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.noise_level import NoiseLevel, level_of
from patchpar.strategies.structure.patch_inputs import PatchInputs


@dataclass(frozen=True, slots=True)
class GuidePrediction:
    """What one call of the denoiser said of the guide and of the picture, all branches that it was asked for."""

    level: NoiseLevel
    layout: PatchInputs
    guide_BChw: Tensor
    whole_BCHW: Tensor


class GuideTrajectory:
    """The guide on one rank; all ranks have the same. `begin` belongs before every picture, `end` after it."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._channels = 0
        self._latent_BChw: Tensor | None = None
        self._predictions: list[GuidePrediction] = []  # in this step

    def begin(self, scheduler: Any, channels: int) -> None:
        """Stand behind the scheduler's step; a latent has so many channels.

        Raises PlanError for a scheduler that takes a step in two halves.
        """
        self.end()
        if getattr(scheduler, "order", 1) != 1:
            raise PlanError(f"guide=flow: {type(scheduler).__name__} steps in two halves: use another, or guide=anchor")
        self._scheduler, self._channels = scheduler, channels

        def stepped(step: Step, model_output: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
            self._go_on(model_output, timestep)
            return step(model_output, timestep, *args, **kwargs)

        scheduler.step = SchedulerStepOverride(scheduler, stepped)

    def end(self) -> None:
        """Stand aside, and forget."""
        if self._scheduler is not None:
            vars(self._scheduler).pop("step", None)
        self._scheduler = self._latent_BChw = None
        self._predictions = []

    def guide_input(self, x_BCHW: Tensor, interlace: Interlace, branches: int) -> Tensor:
        """What the denoiser is shown of the guide, in the place of the anchor. At first it is the anchor.

        Channels beyond the latent's are a picture to fill in: the anchor's.
        """
        anchor = interlace.split(x_BCHW)[0]
        if self._latent_BChw is None:
            self._latent_BChw = anchor[: len(anchor) // branches, : self._channels].float()
        own = self._latent_BChw.to(anchor).repeat(branches, 1, 1, 1)
        return torch.cat([own, anchor[:, self._channels :]], 1)

    def add(self, prediction: GuidePrediction) -> None:
        """One call after the other: a pipeline may ask for every branch of guidance by itself."""
        self._predictions.append(prediction)

    def _go_on(self, model_output: Tensor, timestep: Any) -> None:
        predictions, self._predictions = self._predictions, []
        later = self._next(timestep) if predictions and self._latent_BChw is not None else None
        if later is None or self._latent_BChw is None:
            return
        level, layout = predictions[-1].level, predictions[-1].layout
        whole, guide = (
            torch.cat([getattr(each, name) for each in predictions]) for name in ("whole_BCHW", "guide_BChw")
        )
        output_BCHW = layout.map_of(model_output, (whole.shape[-2], whole.shape[-1]))
        combined = followed(output_BCHW, whole, guide)[:, : self._latent_BChw.shape[1]]
        clean = level.clean(self._latent_BChw, combined)
        noise = (self._latent_BChw - level.signal * clean) / level.noise
        self._latent_BChw = later.signal * clean + later.noise * noise

    def _next(self, timestep: Any) -> NoiseLevel | None:
        times = self._scheduler.timesteps
        group_rank = int((times - torch.as_tensor(timestep).to(times)).abs().argmin()) + 1
        return level_of(self._scheduler, times[group_rank], step=group_rank) if group_rank < len(times) else None


def followed(output_BCHW: Tensor, branches_KCHW: Tensor, others_Kchw: Tensor) -> Tensor:
    """`others` of all branches put together as `output` is of `branches`, a weighted sum for each picture.

    Raises UnsupportedModel where the output is no such sum.
    """
    count = len(output_BCHW)
    evidence = GuidanceFit.of(output_BCHW, branches_KCHW.reshape(-1, *output_BCHW.shape))
    if not evidence.is_sum:
        raise UnsupportedModel(
            "guide=flow: this pipeline does not guide by a weighted sum of its branches, so that the guide cannot "
            "follow it: use guide=anchor"
        )
    return weighed(evidence.weights_BK, others_Kchw.reshape(-1, count, *others_Kchw.shape[1:]))
