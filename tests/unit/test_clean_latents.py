"""A preview shows what the image becomes: with a prediction that is right, exactly the clean latents, from step one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from patchpar.pipeline.clean_latents import last_latents, latents_to_show

SHAPE = (2, 4, 8, 8)
PACKED = (2, 16, 64)


def step_of(scheduler: Any, shape: tuple[int, ...], *, is_flow: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Clean latents, what is shown after the first step with the model's exact prediction, and latents of that step."""
    clean, noise = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    scheduler.set_timesteps(8)
    time = scheduler.timesteps[0]
    if is_flow:
        sigma = scheduler.sigmas[0]
        sample, prediction = (1 - sigma) * clean + sigma * noise, noise - clean
    else:
        sample, prediction = scheduler.add_noise(clean, noise, time[None]), noise
    sample = scheduler.scale_model_input(sample, time) if not is_flow and hasattr(scheduler, "sigmas") else sample
    result = scheduler.step(prediction, time, sample, return_dict=False)
    return clean, latents_to_show(scheduler, (prediction, time, sample), {}, result), result[0]


CASES: dict[str, tuple[Callable[[], Any], bool]] = {
    "DDIM": (lambda: diffusers.DDIMScheduler(clip_sample=False), False),
    "DPM-Solver++": (diffusers.DPMSolverMultistepScheduler, False),
    "DPM-Solver++, stochastic": (
        lambda: diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
        False,
    ),
    "SA-Solver": (diffusers.SASolverScheduler, False),
    "UniPC": (diffusers.UniPCMultistepScheduler, False),
    "flow": (diffusers.FlowMatchEulerDiscreteScheduler, True),
    "flow, stochastic": (lambda: diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), True),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_clean_latents_of_the_first_image(name: str) -> None:
    make, is_flow = CASES[name]
    clean, displayed, _ = step_of(make(), PACKED if is_flow else SHAPE, is_flow=is_flow)
    assert displayed.shape[0] == 1
    torch.testing.assert_close(displayed, clean[:1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "scheduler",
    [diffusers.DEISMultistepScheduler(), diffusers.UniPCMultistepScheduler(predict_x0=False)],
    ids=["DEIS", "UniPC of noise"],
)
def test_a_scheduler_without_an_estimate_shows_its_latents(scheduler: Any) -> None:
    """The control, too: noisy latents are far from the clean ones."""
    clean, displayed, latents = step_of(scheduler, SHAPE, is_flow=False)
    assert torch.equal(displayed, latents[:1])
    assert (displayed - clean[:1]).std() > 0.5


def test_where_each_token_has_a_time_of_its_own_the_latents_are_displayed() -> None:
    """The scheduler's sigma is not theirs."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(8)
    velocity, sample = (torch.randn(PACKED, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    named = {"sample": sample, "per_token_timesteps": scheduler.timesteps[:1].expand(PACKED[:2])}
    result = scheduler.step(velocity, scheduler.timesteps[0], **named)
    assert torch.equal(latents_to_show(scheduler, (velocity, scheduler.timesteps[0]), named, result), result[0][:1])
    without = {"sample": sample}
    assert not torch.equal(latents_to_show(scheduler, (velocity,), without, result), result[0][:1]), "the control"


def test_the_last_step_shows_what_is_decoded() -> None:
    latents = torch.ones(SHAPE, dtype=torch.bfloat16)
    displayed = last_latents((latents, torch.zeros(SHAPE)))
    assert displayed.dtype == torch.float32
    assert torch.equal(displayed, torch.ones((1, *SHAPE[1:])))
