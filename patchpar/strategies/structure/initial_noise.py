"""Noise at either end of the first stage: correlated initial noise of the patches, and fresh noise at the switch.

Both change the pipeline's latent: where it is created, and in the result of the scheduler's step.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.shard.hooks import HookSet
from patchpar.strategies.scheduler_step import Step, WithinSteps, refuse_second_order, with_sample
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.noise_level import level_of

IMAGES_IN = ("image", "timestep", "video")  # parameters of a prepare_latents that adds noise to an image
NOISE_OF_STEPS = ("ets", "derivatives", "order_list")
"""Of schedulers that combine noise predictions of several steps, or several steps into one: attributes."""


def alike(noise_BCHW: Tensor, interlace: Interlace, correlation: float) -> Tensor:
    """Return noise whose patches but the anchor have this correlation, each white in itself: x_BCHW.

    With the anchor, which is what they have in common, it is the square root of that.
    """
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

        self._hooks = HookSet()
        self._hooks.replace(pipe, "prepare_latents", prepare_latents)

    def _made_alike(self, latents: Any) -> Tensor:
        if not isinstance(latents, Tensor) or latents.ndim != 4:
            raise UnsupportedModel(
                f"shared_noise={self._correlation}: {type(self._pipe).__name__} packs its latents: use shared_noise=0"
            )
        return alike(latents, self._interlace_of(latents), self._correlation)

    def close(self) -> None:
        """Restore the pipeline's own prepare_latents."""
        self._hooks.close()


class FreshNoise(WithinSteps):
    """Gives the latent fresh noise where the time falls to `switch`: its estimated clean latent, noised again.

    Call `begin` before every image, `end` after it. The noise depends on `seed` alone: the same on all ranks, and for
    all images of a batch.
    """

    def __init__(self, switch: float, seed: int) -> None:
        self._switch, self._seed = switch, seed

    def begin(self, scheduler: Any) -> None:
        """Override `scheduler.step`. Raises PlanError for a scheduler whose steps depend on noise of earlier ones."""
        self.end()
        refuse_second_order(scheduler, "renoised", "renoised=false")
        if any(hasattr(scheduler, name) for name in NOISE_OF_STEPS):
            raise PlanError(
                f"renoised: {type(scheduler).__name__} combines several steps, whose noise is another one after the "
                "switch: use another scheduler, or renoised=false"
            )

        def stepped(step: Step, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            later = self._next(timestep)
            if later is None or not self._is_below(later[1]) or self._is_below(timestep):
                return step(model_output, timestep, sample, *args, **kwargs)
            clean = self._clean(model_output, timestep, sample)
            result = step(model_output, timestep, sample, *args, **kwargs)
            _restart(scheduler)
            return with_sample(result, self._noised(clean, later[1]).to(sample.dtype))

        self._override(scheduler, stepped)

    def _is_below(self, timestep: Any) -> bool:
        return level_of(self._scheduler, timestep).time <= self._switch

    def _clean(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        """Return the estimate of the clean latent before a step, of the sample's shape, in float32."""
        scheduler = self._scheduler
        x = scheduler.scale_model_input(sample, timestep) if hasattr(scheduler, "scale_model_input") else sample
        return level_of(scheduler, timestep).clean(x.float(), prediction.float())

    def _noised(self, clean: Tensor, later: Tensor) -> Tensor:
        """Return clean latents [B, ...] with noise of the timestep that follows the step that has been made.

        diffusers' schedulers that were told where they begin add that of their current step. Every image gets the same,
        whichever others it is generated with.
        """
        one = torch.randn((1, *clean.shape[1:]), generator=torch.Generator().manual_seed(self._seed))
        noise = one.to(clean.device).expand_as(clean)
        if hasattr(self._scheduler, "scale_noise"):
            return self._scheduler.scale_noise(clean, later[None], noise)
        return self._scheduler.add_noise(clean, noise, later[None])


def _restart(scheduler: Any) -> None:
    """Let a solver forget earlier steps: one that corrects its last step would undo the fresh noise."""
    if hasattr(scheduler, "model_outputs"):
        scheduler.model_outputs = [None] * len(scheduler.model_outputs)
        scheduler.lower_order_nums = 0
    if hasattr(scheduler, "last_sample"):
        scheduler.last_sample = None
