"""Noise at either end of the first stage: correlated initial noise of the patches, and fresh noise at the switch.

Both change the pipeline's latent: where it is created, and in the result of the scheduler's step.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.strategies.scheduler_step import Step, WithinSteps, refuse_second_order, with_sample
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.noise_level import level_of

IMAGES_IN = ("image", "timestep", "video")  # parameters of a prepare_latents that adds noise to an image


def alike(noise_BCHW: Tensor, interlace: Interlace, correlation: float) -> Tensor:
    """Return noise whose patches have this correlation with the anchor, each white in itself: x_BCHW."""
    if correlation == 0:
        return noise_BCHW
    patches = interlace.split(noise_BCHW)
    own = math.sqrt(correlation) * patches[:1] + math.sqrt(1 - correlation) * patches[1:]
    return interlace.join(torch.cat([patches[:1], own]))


class SharedNoise:
    """Correlates the patches of a pipeline's initial latent [B, C, H, W], until `close`.

    Raises UnsupportedModel for a pipeline that does not begin with noise alone.
    """

    def __init__(self, pipe: Any, correlation: float, interlace_of: Callable[[Tensor], Interlace]) -> None:
        self._pipe, self._correlation, self._interlace_of = pipe, correlation, interlace_of
        original = getattr(pipe, "prepare_latents", None)
        parameters = original.__code__.co_varnames if original is not None else IMAGES_IN
        if original is None or any(name in parameters[: original.__code__.co_argcount] for name in IMAGES_IN):
            raise UnsupportedModel(
                f"shared_noise={correlation}: {type(pipe).__name__} does not begin with noise alone: use shared_noise=0"
            )

        @functools.wraps(original)
        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            return self._made_alike(original(*args, **kwargs))

        pipe.prepare_latents = prepare_latents

    def _made_alike(self, latents: Any) -> Tensor:
        if not isinstance(latents, Tensor) or latents.ndim != 4:
            raise UnsupportedModel(
                f"shared_noise={self._correlation}: {type(self._pipe).__name__} packs its latents: use shared_noise=0"
            )
        return alike(latents, self._interlace_of(latents), self._correlation)

    def close(self) -> None:
        """Restore the pipeline's own prepare_latents."""
        del self._pipe.prepare_latents


class FreshNoise(WithinSteps):
    """Gives the latent fresh noise where the time falls to `switch`: its estimated clean latent, noised again.

    Call `begin` before every image, `end` after it. The noise depends on `seed` alone: the same on all ranks.
    """

    def __init__(self, switch: float, seed: int) -> None:
        self._switch, self._seed = switch, seed

    def begin(self, scheduler: Any) -> None:
        """Override `scheduler.step`. Raises PlanError for a second-order scheduler."""
        self.end()
        refuse_second_order(scheduler, "renoised", "renoised=false")

        def stepped(step: Step, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            later = self._next(timestep)
            crosses = later is not None and self._is_below(later[1]) and not self._is_below(timestep)
            fresh = self._noised(model_output, timestep, sample, later[1]) if later is not None and crosses else None
            result = step(model_output, timestep, sample, *args, **kwargs)
            return result if fresh is None else with_sample(result, fresh)

        self._override(scheduler, stepped)

    def _is_below(self, timestep: Any) -> bool:
        return level_of(self._scheduler, timestep).time <= self._switch

    def _noised(self, prediction: Tensor, timestep: Any, sample: Tensor, later: Tensor) -> Tensor:
        scheduler = self._scheduler
        x = scheduler.scale_model_input(sample, timestep) if hasattr(scheduler, "scale_model_input") else sample
        clean = level_of(scheduler, timestep).clean(x.float(), prediction.float())
        noise = torch.randn(sample.shape, generator=torch.Generator().manual_seed(self._seed)).to(sample.device)
        if hasattr(scheduler, "scale_noise"):
            return scheduler.scale_noise(clean, later[None], noise).to(sample.dtype)
        return scheduler.add_noise(clean, noise, later[None]).to(sample.dtype)
