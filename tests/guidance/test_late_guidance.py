"""Guidance that begins in a later step, as in an interval of noise levels (arXiv:2404.07724), or never."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.cfg.split import GuidanceSplit
from tests.unit.threads import on_threads

STEPS = 4


def network(sample: Tensor, text: Tensor) -> Tensor:
    return sample * text + 1.0


def sampled(denoise: Any, clock: StepClock, first: int, *, batched: bool) -> Tensor:
    """The loop of a pipeline whose guidance begins in step `first`."""
    x, texts = torch.linspace(0.1, 1.0, 8).view(1, 2, 2, 2), (torch.full((1, 1, 1, 1), 0.3), torch.ones(1, 1, 1, 1))
    for step in range(STEPS):
        if step < first:
            clock.next_call()
            prediction = denoise(network, x, texts[1])
        elif batched:
            clock.next_call()
            without, of_prompt = denoise(network, torch.cat([x, x]), torch.cat(texts)).chunk(2)
            prediction = without + 2.0 * (of_prompt - without)
        else:
            found = []
            for text in texts:
                clock.next_call()
                found.append(denoise(network, x, text))
            prediction = found[0] + 2.0 * (found[1] - found[0])
        x = x - 0.1 * prediction
        clock.tick()
    return x


def on_rank(transport: Any, first: int, guided: bool | None, batched: bool, world: int = 2) -> Any:
    clock = StepClock()
    clock.reset(guided)
    split = GuidanceSplit(Communicator(transport), Axis("cfg", transport.rank, world, tuple(range(world))), clock)
    split.reset()
    found = sampled(split.denoise, clock, first, batched=batched)
    split.finish()
    return found


@pytest.mark.parametrize("batched", [True, False], ids=["in one call", "one call each"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_guidance_may_begin_in_a_later_step(first: int, batched: bool) -> None:
    want = sampled(lambda forward, *args: forward(*args), StepClock(), first, batched=batched)
    for found in on_threads(2, on_rank, first, True, batched):
        assert torch.allclose(found, want, atol=1e-6), found


def test_a_pipeline_that_does_not_say_so_is_refused_in_its_second_step() -> None:
    """A plan that makes nothing faster is not carried out in silence."""
    for guided in (None, False):
        for found in on_threads(2, on_rank, STEPS, guided, True):
            assert isinstance(found, PlanError)
            assert "this call uses no classifier-free guidance" in str(found)


@pytest.mark.parametrize(
    ("first", "world", "most"), [(STEPS, 2, 1), (0, 3, 2)], ids=["never guided", "a rank too many"]
)
def test_ranks_without_a_branch_are_said(caplog: pytest.LogCaptureFixture, first: int, world: int, most: int) -> None:
    with caplog.at_level(logging.WARNING, "patchpar"):
        on_threads(2, on_rank, 1, True, False)
        assert not caplog.records
        on_threads(world, on_rank, first, True, False, world)
    (record,) = caplog.records
    assert record.message == f"a step had at most {most} guidance branches: cfg={world} was no faster than cfg={most}"
