"""However many ranks share the patches, the image is that of one rank: every mode, lag, scheduler and pipeline."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest

from tests.breadth import first_of
from tests.tensors import relative

from .generation import Case, alone, plain, together

LIMIT = 1e-5
MODES: dict[str, dict[str, Any]] = {
    "calibrated": {},
    "lagging": {"lag": 1},
    "masked": {"masked": True, "weight": 0.7, "decay": "cosine"},
    "masked-lagging": {"masked": True, "lag": 1},
    "not-kept": {"structure_strength": 0.0},
    "renoised": {"renoised": True},
    "paper": {"preset": "paper"},
    "paper-lagging": {"preset": "paper", "lag": 1},
    "no-overlap": {"overlap": 0.0},
    "touching-with-context": {"margin": 0.0, "context": 0.5, "switch": 0.7},
    "overlapping-with-context": {"context": 0.25, "switch": 0.7},
    "flow": {"guide": "flow", "switch": 0.7},
    "flow-lagging": {"guide": "flow", "switch": 0.7, "lag": 1, "margin": 0.25},
}


@pytest.mark.parametrize("mode", first_of(MODES, "masked-lagging", "paper"))
def test_ranks_generate_the_image_of_one(mode: str) -> None:
    case = Case(options=MODES[mode])
    want = alone(case)
    assert all(relative(generated.latents, want) < LIMIT for generated in together(case, 2))


def test_no_exchange_no_image() -> None:
    """The negative control of all others."""
    options = {"weight": 0.5}
    found = together(Case(exchange="off", options=options), 2)
    assert relative(found[0].latents, alone(Case(options=options))) > 1e-2


def test_context_travels() -> None:
    """Windows of other ranks are seen: without exchange, or without context, the image is another one."""
    options = {"margin": 0.0, "context": 0.5, "switch": 0.7, "structure_strength": 0.0}
    want = alone(Case(options=options))
    assert relative(alone(Case(options=options | {"context": 0.0})), want) > 1e-3
    found = together(Case(options=options), 3)
    assert all(generated.bytes_sent["context"] > 0 for generated in found)
    assert all(relative(generated.latents, want) < LIMIT for generated in found)


@pytest.mark.breadth
@pytest.mark.parametrize("world", first_of([3, 5, 11], 5))
def test_many_ranks(world: int) -> None:
    """Eight units in the first stage, eighteen in the second: some ranks have none at first."""
    case = Case(options={"masked": True}, steps=2)
    want = alone(case)
    assert all(relative(generated.latents, want) < LIMIT for generated in together(case, world))


SCHEDULERS = {
    "Euler": diffusers.EulerDiscreteScheduler,
    "DPM++ 2M": diffusers.DPMSolverMultistepScheduler,
    "Heun": diffusers.HeunDiscreteScheduler,
}


@pytest.mark.parametrize("scheduler", first_of(SCHEDULERS, "DPM++ 2M"))
def test_schedulers(scheduler: str) -> None:
    """Of the sigma family, with a memory, with two evaluations a step."""
    case = Case(scheduler=SCHEDULERS[scheduler], options={"lag": 1})
    want = alone(case)
    assert all(relative(generated.latents, want) < LIMIT for generated in together(case, 2))


SQUARE = {"height": 128, "width": 128}
PIPELINES: dict[str, dict[str, Any]] = {
    "sdxl": {"height": 128, "width": 192},
    "sd_inpaint": {"height": 128, "width": 128, "strength": 0.99},
    "sd_img2img": {"strength": 0.99},
    "sd3": {},
    "flux": {},
}


@pytest.mark.parametrize("pipeline", first_of(PIPELINES, "flux"))
def test_pipelines(pipeline: str) -> None:
    """With size conditioning, nine channels, joint attention, packed tokens."""
    case = Case(pipeline=pipeline, arguments=PIPELINES[pipeline] or SQUARE, options={"masked": True})
    want = alone(case)
    assert relative(plain(case), want) > 1e-2  # it would not show otherwise
    assert all(relative(generated.latents, want) < LIMIT for generated in together(case, 2))


@pytest.mark.breadth
@pytest.mark.parametrize(("height", "width"), first_of([(168, 96), (128, 64), (104, 128)], (168, 96)))
def test_sizes(height: int, width: int) -> None:
    """Sides that are no whole number of native ones, or only one of them larger."""
    case = Case(arguments={"height": height, "width": width}, options={"masked": True})
    want = alone(case)
    assert all(relative(generated.latents, want) < LIMIT for generated in together(case, 2))
