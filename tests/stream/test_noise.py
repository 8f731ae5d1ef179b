"""Noise is a function of where it belongs; noise levels follow the schedule."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from patchpar.errors import PlanError
from patchpar.models.streaming.flow_schedule import FlowSchedule, keyed_noise
from tests.tensors import noise


def test_the_same_key_is_the_same_noise_and_no_other_is() -> None:
    keys = list(product((0, 1, 2**64 - 1), range(3), range(3)))
    generated = {key: keyed_noise(*key, (4, 5)) for key in keys}
    assert all(torch.equal(generated[key], keyed_noise(*key, (4, 5))) for key in reversed(keys))
    assert all(not torch.equal(generated[a], generated[b]) for a in keys for b in keys if a < b)


def test_it_is_normal() -> None:
    x = keyed_noise(3, 1, 0, (100_000,))
    y = keyed_noise(3, 2, 0, (100_000,))
    assert abs(float(x.mean())) < 0.02
    assert abs(float(x.std()) - 1) < 0.02
    assert abs(float((x * y).mean())) < 0.02


def test_a_seed_has_64_bits() -> None:
    for seed in (-1, 2**64):
        with pytest.raises(PlanError, match="below 2\\*\\*64"):
            keyed_noise(seed, 0, 0, (1,))


def test_euler_steps_are_those_of_diffusers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    flow = FlowSchedule.shifted(4)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    assert [flow.timestep(step) for step in range(4)] == pytest.approx(scheduler.timesteps.tolist())
    mine = theirs = noise(2, 3)
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = noise(2, 3, seed=1 + step)
        mine = flow.advance(step, mine, velocity, None)
        theirs = scheduler.step(velocity, timestep, theirs, return_dict=False)[0]
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_renoising_ends_in_the_clean_image() -> None:
    flow = FlowSchedule(sigmas=(1.0, 0.4, 0.0), sampler="renoise")
    clean, first, second = (noise(3, seed=seed) for seed in range(3))
    x = flow.advance(0, first, first - clean, second)
    assert torch.allclose(x, 0.6 * clean + 0.4 * second, atol=1e-6)
    assert torch.allclose(flow.advance(1, x, second - clean, None), clean, atol=1e-6)
    assert [flow.needs_noise(step) for step in range(2)] == [True, False]


@pytest.mark.parametrize("sigmas", [(1.0,), (1.0, 0.5), (0.5, 0.7, 0.0), (1.2, 0.0)])
def test_levels_that_do_not_fall_to_zero_are_refused(sigmas: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match="fall from at most 1 to 0"):
        FlowSchedule(sigmas=sigmas)


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(PlanError, match="'euler' or 'renoise'"):
        FlowSchedule(sigmas=(1.0, 0.0), sampler="heun")  # type: ignore[arg-type]
