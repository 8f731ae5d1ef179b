"""A call's level is what the scheduler does: seen from its own steps, of every kind that can be guided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.strategies.structure.noise_level import level_of, refuse_thresholding, refuse_without_signal

BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULERS = [
    diffusers.DDIMScheduler(**BETAS),
    diffusers.DDIMScheduler(**BETAS, prediction_type="v_prediction"),
    diffusers.DDIMScheduler(**BETAS, prediction_type="sample", clip_sample=False),
    diffusers.EulerDiscreteScheduler(**BETAS),
    diffusers.EulerDiscreteScheduler(**BETAS, prediction_type="v_prediction", timestep_spacing="trailing"),
    diffusers.HeunDiscreteScheduler(**BETAS),
    diffusers.DPMSolverMultistepScheduler(**BETAS),
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
]


def noised(scheduler: Any, clean: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """What the denoiser is given, made by the scheduler's own functions."""
    times = time[None]
    if hasattr(scheduler, "scale_noise"):
        return scheduler.scale_noise(clean, times, noise)
    sample = scheduler.add_noise(clean, noise, times)
    return scheduler.scale_model_input(sample, time)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda s: f"{type(s).__name__}-{s.config.get('prediction_type')}")
def test_a_perfect_prediction_tells_the_clean_latent(scheduler: Any) -> None:
    """Noise as the scheduler does it, predict as it wants it: x0 comes out, and slopes are what they are."""
    scheduler.set_timesteps(10)
    clean, noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    for time in scheduler.timesteps[1:-1:3]:
        scheduler.set_timesteps(10)  # the next one is the first that it is asked for
        level = level_of(scheduler, time)
        x = noised(scheduler, clean, noise, time)
        assert torch.allclose(x, level.signal * clean + level.noise * noise, atol=2e-3)
        x = level.signal * clean + level.noise * noise
        predictions = {
            "epsilon": noise,
            "v_prediction": level.signal * noise - level.noise * clean,
            "sample": clean,
            "flow": noise - clean,
        }
        prediction = predictions[level.predicts]
        assert torch.allclose(level.clean(x, prediction), clean, atol=1e-4)
        if level.predicts != "flow":
            assert torch.allclose(level.noise_in(x, prediction), noise, atol=1e-4)
        moved = prediction + level.per_clean * 0.1
        assert torch.allclose(level.clean(x, moved), clean + 0.1, atol=1e-4)
        moved = prediction + level.per_noise * 0.1
        assert torch.allclose(level.noise_in(x, moved), level.noise_in(x, prediction) + 0.1, atol=1e-4)


def test_flow_matching_begins_with_noise_alone() -> None:
    """What it predicts is what is interpolated, at any signal."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    level = level_of(scheduler, scheduler.timesteps[0])
    assert (level.signal, level.noise, level.per_noise) == (0.0, 1.0, 1.0)


def test_times_of_flux() -> None:
    """FLUX tells its transformer times from 0 to 1."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    for position, time in enumerate(scheduler.timesteps):
        scheduler._step_index = position
        assert level_of(scheduler, time / 1000).time == pytest.approx(float(time) / 1000)
        assert level_of(scheduler, time).time == pytest.approx(float(time) / 1000)


def test_what_cannot_be_done() -> None:
    edm = diffusers.EDMEulerScheduler()
    with pytest.raises(UnsupportedModel, match="does not give the noise level"):
        level_of(edm, 0.5)
    clipped = SimpleNamespace(config={"thresholding": True})
    with pytest.raises(PlanError, match="thresholding=False"):
        refuse_thresholding(clipped)


@pytest.mark.parametrize("kind", ["v_prediction", "sample"])
def test_noise_is_not_interpolated_where_there_is_nothing_else(kind: str) -> None:
    """The prediction is divided by the signal, which schedulers with zero terminal SNR begin without."""
    own = {"prediction_type": kind, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    for scheduler in (diffusers.DDIMScheduler(**BETAS, **own), diffusers.EulerDiscreteScheduler(**BETAS, **own)):
        scheduler.set_timesteps(4)
        first, second = (level_of(scheduler, time) for time in scheduler.timesteps[:2])
        assert abs(first.per_noise) > 1e3
        with pytest.raises(PlanError, match=r"at time 0\.999 there is nothing else .*use space=x0"):
            refuse_without_signal(first, "eps")
        refuse_without_signal(first, "x0")
        refuse_without_signal(second, "eps")
