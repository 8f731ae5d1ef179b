"""Structure guidance leaves the noise in a latent what the scheduler believes it to be, and the structure one."""

from __future__ import annotations

from functools import cache

import diffusers
import pytest
import torch

from benchmarks.highres.analytic import Calibration, calibrate
from patchpar.errors import PlanError
from patchpar.strategies.structure.initial_noise import FreshNoise
from patchpar.strategies.structure.options import StructureGuidance


@cache
def found(**options: object) -> Calibration:
    return calibrate(StructureGuidance(**options).method, side=32, images=16)  # type: ignore[arg-type]


@pytest.mark.parametrize("lag", [0, 1])
def test_clean_latents_pulled_together_are_calibrated(lag: int) -> None:
    """Noise power at the switch within 0.95 and 1.05 of theory, and patches that agree."""
    ours = found(lag=lag)
    assert 0.95 < ours.noise_power < 1.05
    assert ours.agreement > 0.9


def test_noise_pulled_together_is_not() -> None:
    """The negative control: equation 3, patches with noise of their own, leaves a multiple of the noise."""
    paper = found(preset="paper", shared_noise=0.0)
    assert paper.noise_power > 2
    assert paper.agreement < 0.2


def test_the_paper_works_with_noise_that_is_shared() -> None:
    """Our assumption where the paper is silent: it then agrees, and misses the calibration by little."""
    shared = found(preset="paper")
    assert shared.agreement > 0.8
    assert 0.5 < shared.noise_power < 1.5


def test_nobody_agrees_by_chance() -> None:
    assert abs(found(weight=0.0).agreement) < 0.2


@pytest.mark.parametrize("kind", [diffusers.DDIMScheduler, diffusers.EulerDiscreteScheduler])
def test_fresh_noise_at_the_switch(kind: type) -> None:
    """The step that crosses the switch gives a latent whose clean part is the prediction's, with power as it is to be.

    The scheduler is left as it was; others steps are its own.
    """
    scheduler = kind(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    scheduler.set_timesteps(4)
    crossing = int((scheduler.timesteps > 500).sum())
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 1, 4, 64, 64, generator=generator)
    fresh = FreshNoise(0.5, seed=3)
    fresh.begin(scheduler)
    first, then = scheduler.timesteps[crossing - 1 : crossing + 1]
    begun = scheduler.add_noise(clean, noise, first[None])
    got = scheduler.step(noise, first, begun, return_dict=False)[0]
    fresh.end()
    assert "step" not in vars(scheduler)
    power = float(scheduler.add_noise(torch.zeros_like(clean), noise, then[None]).std())
    signal = float(scheduler.add_noise(clean, torch.zeros_like(noise), then[None]).std() / clean.std())
    rest = got - signal * clean
    assert float(rest.std()) == pytest.approx(power, rel=0.02)
    assert abs(float((rest * noise).mean()) / power) < 0.05  # not the noise it had


def test_halved_steps_cannot_be_renoised() -> None:
    with pytest.raises(PlanError, match="is of second order"):
        FreshNoise(0.5, 0).begin(diffusers.HeunDiscreteScheduler())
