"""The guide of a cascade: an image at native size, denoised in parallel with the large one.

    time        1 ... switch                     ... 0
    large       guided by its anchor             windows, guided by the guide
    guide       is the anchor                    a separate latent, one evaluation a step beside the windows

The anchor of a large latent holds ever finer detail, sampled too sparsely to be an image; the guide stays an image that
the model generates at native size. It takes a deterministic step (DDIM, arXiv:2010.02502) with every step of the
pipeline's scheduler, with the same weights of the guidance branches, which are fitted (`GuidanceFit`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.strategies.scheduler_step import Step, WithinSteps, refuse_second_order
from patchpar.strategies.structure.guidance_fit import GuidanceFit, weighed
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.noise_level import NoiseLevel, level_of
from patchpar.strategies.structure.patch_inputs import PatchInputs


@dataclass(frozen=True, slots=True)
class GuidePrediction:
    """The predictions of one denoiser call for the guide and for the image, with all branches of the call."""

    level: NoiseLevel
    layout: PatchInputs
    guide_BChw: Tensor
    whole_BCHW: Tensor


class GuideTrajectory(WithinSteps):
    """The guide on one rank; all ranks have the same. Call `begin` before every image, `end` after it."""

    def __init__(self) -> None:
        self._channels = 0
        self._latent_BChw: Tensor | None = None
        self._predictions: list[GuidePrediction] = []  # in this step

    def begin(self, scheduler: Any, channels: int) -> None:
        """Override `scheduler.step`. `channels`: of a latent. Raises PlanError for a second-order scheduler."""
        self.end()
        refuse_second_order(scheduler, "guide=flow", "guide=anchor")
        self._channels = channels

        def stepped(step: Step, model_output: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
            self._advance(model_output, timestep)
            return step(model_output, timestep, *args, **kwargs)

        self._override(scheduler, stepped)

    def end(self) -> None:
        """Restore `scheduler.step` and forget the image."""
        super().end()
        self._latent_BChw, self._predictions = None, []

    def guide_input(self, x_BCHW: Tensor, interlace: Interlace, branches: int) -> Tensor:
        """Return the denoiser's input for the guide, x_BChw with all branches. At first it is the anchor of x_BCHW.

        Channels beyond the latent's hold the inpainting input and are those of the anchor.
        """
        anchor = interlace.split(x_BCHW)[0]
        if self._latent_BChw is None:
            self._latent_BChw = anchor[: len(anchor) // branches, : self._channels].float()
        own = self._latent_BChw.to(anchor).repeat(branches, 1, 1, 1)
        return torch.cat([own, anchor[:, self._channels :]], 1)

    def add(self, prediction: GuidePrediction) -> None:
        """Add the predictions of one call; a pipeline may make one call for each guidance branch."""
        self._predictions.append(prediction)

    def _advance(self, model_output: Tensor, timestep: Any) -> None:
        predictions, self._predictions = self._predictions, []
        following = self._next(timestep)
        if not predictions or self._latent_BChw is None or following is None:
            return
        later = level_of(self._scheduler, following[1], step=following[0])
        level, layout = predictions[-1].level, predictions[-1].layout
        whole, guide = (
            torch.cat([getattr(each, name) for each in predictions]) for name in ("whole_BCHW", "guide_BChw")
        )
        output_BCHW = layout.map_of(model_output, (whole.shape[-2], whole.shape[-1]))
        combined = followed(output_BCHW, whole, guide)[:, : self._latent_BChw.shape[1]]
        clean = level.clean(self._latent_BChw, combined)
        noise = (self._latent_BChw - level.signal * clean) / level.noise
        self._latent_BChw = later.signal * clean + later.noise * noise


def followed(output_BCHW: Tensor, branches_KCHW: Tensor, others_Kchw: Tensor) -> Tensor:
    """Return the branches of `others` combined with the weights that combine `branches` to `output`: [B, C, h, w].

    Raises UnsupportedModel if the output is not a weighted sum of the branches.
    """
    count = len(output_BCHW)
    evidence = GuidanceFit.of(output_BCHW, branches_KCHW.reshape(-1, *output_BCHW.shape))
    if not evidence.is_sum:
        raise UnsupportedModel(
            "guide=flow: this pipeline does not guide by a weighted sum of its branches, so that the guide cannot "
            "follow it: use guide=anchor"
        )
    return weighed(evidence.weights_BK, others_Kchw.reshape(-1, count, *others_Kchw.shape[1:]))
