"""Whole pipelines on two workers: the images of one process, encoded and decoded by both."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.breadth import first_of
from tests.pipeline.conftest import EXACT, Hold, generator, relative_error
from tests.tiny import build

from .pipelines import GoesOn

CASES = {
    "sdxl": ("cfg=2", "patch=2"),
    "sd3": ("patch=2",),
    "wan": ("cfg=2",),
    "sdxl_inpaint": ("patch=2",),
}


@pytest.mark.parametrize("name", first_of(CASES, "sdxl"))
def test_the_images_of_one_process(hold: Hold, name: str) -> None:
    tiny = build(name)
    call = {**tiny.call_kwargs, "num_inference_steps": 2, "output_type": "np"}
    given = copy.deepcopy(call)
    want = tiny.pipe(**call, generator=generator())
    with hold(tiny.pipe) as parallel:
        for plan in CASES[name]:
            parallel.plan = plan
            got = parallel(**copy.deepcopy(given), generator=generator())
            assert relative_error(got, want) <= EXACT
            run = parallel.last_run
            assert run is not None
            assert min(run.vae_bytes) > 0
            assert "for the VAE" in str(run)
            assert run.as_dict()["vae_bytes"] == list(run.vae_bytes)
            assert all("vae" not in step.bytes_sent for rank in run.ranks for step in rank.steps)
            assert all(rank.steps[-1].bytes_sent == rank.steps[0].bytes_sent for rank in run.ranks)


@pytest.mark.parametrize("name", first_of(["sdxl", "sd_img2img"], "sdxl"))
def test_without_exchange_they_are_others(hold: Hold, name: str) -> None:
    """The negative control: denoised exactly, but encoded or decoded in bands that know nothing of each other."""
    tiny = build(name)
    call = {**tiny.call_kwargs, "num_inference_steps": 2, "output_type": "np"}
    want = tiny.pipe(**copy.deepcopy(call), generator=generator())
    with hold(tiny.pipe) as parallel:
        parallel.plan = "cfg=2"
        assert relative_error(parallel(**copy.deepcopy(call), generator=generator()), want) <= EXACT
        parallel._executor.call("control", vae="off")
        got = parallel(**copy.deepcopy(call), generator=generator())
    assert relative_error(got, want) > 1000 * EXACT


def test_a_pipeline_that_needs_what_it_has_decoded(hold: Hold) -> None:
    tiny = build("sdxl")
    pipe = GoesOn(**tiny.pipe.components)
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a red house", "height": 64, "width": 64, "num_inference_steps": 2}
    plain = generator()
    want = pipe(**call, generator=plain).images
    with hold(pipe) as parallel:
        for _ in range(2):  # the first is generated again, the second knows
            after, steps = generator(), list[int]()
            parallel.on_step = lambda step, _, steps=steps: steps.append(step)
            got = parallel(**call, generator=after).images
            assert np.linalg.norm(got - want) <= EXACT * np.linalg.norm(want)
            assert parallel.last_run is not None
            assert parallel.last_run.steps == 2
            assert steps == [1, 2]
            assert torch.equal(after.get_state(), plain.get_state())


def test_its_callback_is_called_once_a_step(hold: Hold) -> None:
    """What it has changed would stay in the networks if the call was made again: the first step would have it too."""
    tiny = build("sdxl")
    pipe = GoesOn(**tiny.pipe.components)
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"prompt": "a red house", "height": 64, "width": 64, "num_inference_steps": 2}
    seen = list[int]()

    def filtered(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(step)
        if step == 0:
            pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
        return tensors

    untouched = pipe(**call, generator=generator()).images
    with hold(pipe) as parallel:
        parallel.plan = "cfg=2"
        got = parallel(**call, generator=generator(), callback_on_step_end=filtered).images
    assert seen == [0, 1]
    want = pipe(**call, generator=generator(), callback_on_step_end=filtered).images
    assert np.linalg.norm(got - want) <= EXACT * np.linalg.norm(want)
    assert np.linalg.norm(untouched - want) > 100 * EXACT * np.linalg.norm(want)


def test_one_rank_alone_sends_nothing(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = build("sdxl")
    call: dict[str, Any] = {**tiny.call_kwargs, "num_inference_steps": 1, "output_type": "np"}
    want = tiny.pipe(**call, generator=generator())
    with hold(tiny.pipe) as parallel:
        parallel.plan = "cfg=2"
        request = parallel._state.request
        monkeypatch.setattr(parallel._state, "request", copy.copy(request))
        object.__setattr__(parallel._state.request, "vae", "rank0")
        got = parallel(**call, generator=generator())
        run = parallel.last_run
        monkeypatch.undo()
    assert relative_error(got, want) <= EXACT
    assert run is not None
    assert run.vae_bytes == (0, 0)
    assert "VAE" not in str(run)
