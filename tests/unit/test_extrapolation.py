"""How far a step goes beyond the last, from timesteps as schedulers tell them."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch

from patchpar.shard.stale.extrapolation import StepExtrapolator, timestep_of


def paces(times: list[Any]) -> list[float]:
    pace = StepExtrapolator()
    return [float(pace.step_ratio(evaluation, time)) for evaluation, time in enumerate(times)]


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda time: torch.full((4,), time)])
def test_steps_of_different_length(kind: Any) -> None:
    assert paces([kind(time) for time in (1000.0, 900.0, 800.0, 750.0, 650.0)]) == [0.0, 0.0, 1.0, 0.5, 2.0]


def test_tokens_that_are_given() -> None:
    """As Wan 2.2 has one timestep for each token: that of the given first frame is 0 in every step."""
    times = [torch.tensor([[0.0, 0.0, time, time]]) for time in (1000.0, 900.0, 800.0, 750.0)]
    assert paces(times) == [0.0, 0.0, 1.0, 0.5]


def test_steps_that_grow_fast_are_not_followed() -> None:
    assert paces([1000.0, 990.0, 900.0, 905.0]) == [0.0, 0.0, 2.0, 0.0]


def test_two_evaluations_at_one_time() -> None:
    """As Heun's: a prediction, its correction at the next time, and the next prediction there as well."""
    assert paces([1000.0, 900.0, 900.0, 800.0, 800.0]) == [0.0, 0.0, 0.0, 0.0, 0.0]


def test_unknown_times_are_taken_as_even() -> None:
    assert paces([None] * 4) == [0.0, 0.0, 1.0, 1.0]


def test_a_gap_and_a_new_image_begin_anew() -> None:
    pace = StepExtrapolator()
    for evaluation in range(3):
        pace.step_ratio(evaluation, 1000.0 - 100 * evaluation)
    assert float(pace.step_ratio(4, 600.0)) == 0.0
    assert [float(pace.step_ratio(each, 1000.0 - 100 * each)) for each in (5, 6)] == [0.0, 1.0]
    pace.reset()
    assert float(pace.step_ratio(7, 400.0)) == 0.0


def test_within_an_evaluation_every_call_has_the_same() -> None:
    pace = StepExtrapolator()
    for evaluation, time in enumerate((1000.0, 900.0, 850.0)):
        assert float(pace.step_ratio(evaluation, time)) == float(pace.step_ratio(evaluation, time))
    assert float(pace.step_ratio(2, 850.0)) == 0.5


def test_where_the_timestep_is() -> None:
    names = ("sample", "timestep", "encoder_hidden_states")
    assert timestep_of(names, ("x", 5), {}) == 5
    assert timestep_of(names, ("x",), {"timestep": 6}) == 6
    assert timestep_of(("hidden_states",), ("x",), {}) is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (diffusers.HiDreamImageTransformer2DModel, "timesteps"),
        (diffusers.ZImageTransformer2DModel, "t"),
        (diffusers.StableCascadeUNet, "timestep_ratio"),
    ],
)
def test_networks_that_call_it_otherwise(kind: Any, name: str) -> None:
    """As ComfyUI's UNet does, too."""
    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    assert timestep_of(names, names, {}) == name
    assert timestep_of(names, names[:1], {name: 5}) == 5
    assert timestep_of(names, names[:1], {}) is None
