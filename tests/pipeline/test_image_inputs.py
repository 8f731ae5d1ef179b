"""Pipelines that take images, and video: their arguments reach all ranks, their results are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from patchpar import PlanError
from tests.breadth import first_of
from tests.tiny import build

from .conftest import EXACT, Hold, generator, relative_error

NAMES = ("sd_img2img", "sdxl_inpaint", "sdxl_controlnet", "svd")


@pytest.mark.parametrize(
    ("name", "plan"),
    first_of(
        [(name, plan) for name in NAMES for plan in ("cfg=2", "patch=2")],
        ("sdxl_controlnet", "patch=2"),
    ),
)
def test_images_as_input(hold: Hold, name: str, plan: str) -> None:
    tiny = build(name)
    call = {**tiny.call_kwargs, "num_inference_steps": 3, "output_type": "latent"}
    given = copy.deepcopy(call)
    want = tiny.pipe(**call, generator=generator())
    with hold(tiny.pipe) as parallel:
        parallel.plan = plan
        got = parallel(**call, generator=generator())
    assert relative_error(got, want) <= EXACT
    assert _pixels(call) == _pixels(given)


@pytest.mark.parametrize("plan", first_of(["cfg=2", "patch=2"], "cfg=2"))
def test_a_strength_that_leaves_no_step_is_refused_by_all_ranks(hold: Hold, plan: str) -> None:
    """diffusers goes on with empty tensors, which ranks find at different places: they would be started anew."""
    tiny = build("sd_img2img")
    call = {**tiny.call_kwargs, "num_inference_steps": 3, "output_type": "latent"}
    with hold(tiny.pipe) as parallel:
        parallel.plan = plan
        with pytest.raises(PlanError, match=r"strength=0.2, num_inference_steps=3: no denoising step is left"):
            parallel(**{**call, "strength": 0.2})
        want = tiny.pipe(**call, generator=generator())
        assert relative_error(parallel(**call, generator=generator()), want) <= EXACT


@pytest.mark.parametrize("plan", first_of(["cfg=2", "patch=2"], "patch=2"))
def test_a_refiner_that_starts_after_the_last_step_returns_its_image(hold: Hold, plan: str) -> None:
    """With `denoising_start` diffusers adds no noise, so that nothing is empty where no step is left."""
    tiny = build("sdxl_img2img")
    call = {**tiny.call_kwargs, "num_inference_steps": 3, "output_type": "latent", "denoising_start": 0.999}
    want = tiny.pipe(**call, generator=generator())
    with hold(tiny.pipe) as parallel:
        parallel.plan = plan
        assert relative_error(parallel(**call, generator=generator()), want) <= EXACT
        assert parallel.last_run.steps == 0


@pytest.mark.breadth
def test_frames_of_a_video(hold: Hold) -> None:
    tiny = build("svd")
    call = {**tiny.call_kwargs, "num_inference_steps": 2, "output_type": "np"}
    want = tiny.pipe(**call, generator=generator())
    with hold(tiny.pipe) as parallel:
        got = parallel(**call, generator=generator())
    assert got.frames.shape == (1, 3, 128, 128, 3)
    assert relative_error(got, want) <= EXACT


def test_prompts_of_some_frames(hold: Hold) -> None:
    """FreeNoise takes them as a dict, of texts by number of the frame; between them embeddings are interpolated."""
    tiny = build("animatediff")
    tiny.pipe.enable_free_noise(context_length=2, context_stride=1)
    call = {**tiny.call_kwargs, "num_frames": 4, "num_inference_steps": 2, "output_type": "latent"}
    call |= {"prompt": {0: "a red house", 3: "a blue boat"}, "negative_prompt": {0: "fog", 3: "rain"}}
    want = tiny.pipe(**call, generator=generator())
    other = tiny.pipe(**{**call, "prompt": "a red house", "negative_prompt": "fog"}, generator=generator())
    with hold(tiny.pipe) as parallel:
        parallel.plan = "cfg=2"
        assert relative_error(parallel(**call, generator=generator()), want) <= EXACT
    assert relative_error(other, want) > 10 * EXACT


def _pixels(call: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in call.items() if hasattr(value, "tobytes")}
