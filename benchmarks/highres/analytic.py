"""A denoiser that is known in closed form, and what structure guidance does to the noise it leaves in a latent.

Latents are Gaussian fields whose power falls with frequency as natural images' does, k^-2.5. Their best denoiser
weighs every frequency by itself, so that power can be compared with theory: signal * S(k) + noise, band by band. Where
the prediction is put together wrongly, the noise in x_t is not what the scheduler believes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.structure.attention_map import AttentionMap
from patchpar.strategies.structure.content_tokens import ContentTokens
from patchpar.strategies.structure.evaluate import DenoiserCall
from patchpar.strategies.structure.initial_noise import alike
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.interlaced_stage import InterlacedStage
from patchpar.strategies.structure.noise_level import level_of
from patchpar.strategies.structure.patch_inputs import PatchInputs
from patchpar.strategies.structure.prediction_merge import PredictionMerge
from patchpar.strategies.structure.structure import Method

SLOPE, STEPS = 2.5, 50
FINE = 0.27  # cycles per latent: beyond what a patch of a 2 x 2 interlace can hold, the signal is next to nothing


def frequencies(side: int) -> Tensor:
    """Of every bin of a square transform, cycles per sample."""
    along = torch.fft.fftfreq(side)
    return torch.sqrt(along[:, None] ** 2 + along**2)


def spectrum(side: int) -> Tensor:
    """Power of the clean field, mean 1."""
    power = frequencies(side).clamp_min(1 / side) ** -SLOPE
    return power / power.mean()


class FieldDenoiser:
    """The posterior mean as a noise prediction, at any level of a scheduler."""

    def __init__(self, scheduler: Any, side: int) -> None:
        self.scheduler, self.power = scheduler, spectrum(side)

    def __call__(self, x_BCHW: Tensor, timestep: Tensor) -> tuple[Tensor]:
        """The denoiser's own forward."""
        level = level_of(self.scheduler, timestep)
        gain = level.signal * self.power / (level.signal**2 * self.power + level.noise**2)
        clean = torch.fft.ifft2(torch.fft.fft2(x_BCHW) * gain).real
        return ((x_BCHW - level.signal * clean) / level.noise,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """At the switch: `noise_power` of x_t beyond the signal's frequencies, over theory.

    `agreement`: the correlation of the patches' coarse structure with the anchor's.
    """

    noise_power: float
    agreement: float


def scheduler_of(steps: int = STEPS) -> Any:
    """SDXL's noise levels."""
    betas: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = diffusers.DDIMScheduler(**betas, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    scheduler.set_timesteps(steps)
    return scheduler


def calibrate(method: Method, *, side: int = 64, scale: int = 2, images: int = 16, seed: int = 0) -> Calibration:
    """Run the first stage on `images` fields of `scale` x `side` and look at what it leaves."""
    scheduler = scheduler_of()
    interlace = Interlace((scale * side, scale * side), (scale, scale))
    clock = StepClock()
    mesh: tuple[Any, Axis] = (None, Axis("patch"))
    stage = InterlacedStage(method, mesh, clock, AttentionMap(nn.Module()), ContentTokens(SimpleNamespace()))
    x = torch.randn(images, 1, *interlace.size, generator=torch.Generator().manual_seed(seed))
    x = alike(x, interlace, method.shared_noise)
    forward = FieldDenoiser(scheduler, side)
    times = [time for time in scheduler.timesteps if time / 1000 > method.switch]
    for time in times:
        layout = PatchInputs.of(((x, time), {}), pixels=8)
        asked = DenoiserCall(forward=forward, layout=layout, branches=1)
        part, _ = stage.predict(asked, level_of(scheduler, time), interlace)
        prediction = part.finish(PredictionMerge(mesh, f"step {clock.evaluation}").at_once(part))
        x = scheduler.step(prediction, time, x).prev_sample
        clock.tick()
    after = scheduler.timesteps[len(times)]
    return Calibration(
        noise_power=_noise_power(x, level_of(scheduler, after).noise),
        agreement=_agreement(x, interlace, forward, after),
    )


def _noise_power(x_BCHW: Tensor, noise: float) -> float:
    power = torch.fft.fft2(x_BCHW).abs().square().mean((0, 1)) / math.prod(x_BCHW.shape[-2:])
    return float(power[frequencies(len(power)) > FINE].mean()) / noise**2


def _agreement(x_BCHW: Tensor, interlace: Interlace, forward: Callable[..., tuple[Tensor]], time: Tensor) -> float:
    level = level_of(forward.scheduler, time)
    patches = interlace.split(x_BCHW)
    clean = level.clean(patches, forward(patches, time)[0])
    coarse = torch.fft.ifft2(torch.fft.fft2(clean) * (frequencies(clean.shape[-1]) < 0.06)).real
    anchor, others = coarse[:1].flatten(1), coarse[1:].flatten(1)
    return float(torch.nn.functional.cosine_similarity(anchor, others).mean())
