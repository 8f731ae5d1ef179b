"""Several prompts on several ranks: what each call encodes or samples beside the latents of its prompts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.strategies.data.noise import BROWNIAN, NoiseRows, noise_of_whole_batch
from patchpar.strategies.data.split import as_one_call, split_call
from tests import tiny
from tests.breadth import first_of
from tests.guidance.test_data import LATENT, PROMPTS, alone, error, generators, on_all
from tests.tiny import sample_images

ENCODED_IN_TURN = ("ltx_image", "cogvideox_image")
ROW_EACH = (
    "audio_latents",
    "attention_mask",
    "negative_attention_mask",
    "generated_prompt_embeds",
    "image_embeddings",
    "prior_latents",
    "hint",
)


def with_images(name: str, generator: Any) -> dict[str, Any]:
    side = tiny.build(name).call_kwargs["height"]
    images = [sample_images.scene(side, side)] * len(PROMPTS)
    return {"prompt": PROMPTS, "image": images, "num_inference_steps": 2, "generator": generator}


@pytest.mark.parametrize("name", first_of(ENCODED_IN_TURN, "ltx_image"))
def test_images_that_are_encoded_one_after_another_need_a_generator_each(name: str) -> None:
    """With one, the noise of an image comes after that of the images before it, which other ranks encode."""
    for generator in (generators(1)[0], None):
        call = with_images(name, generator)
        with pytest.raises(PlanError, match=r"one image after another.*list of one for each prompt"):
            on_all(name, 2, call)
    call = with_images(name, generators(3))
    assert error(on_all(name, 2, call)[0], alone(name, call)[0]) <= 1e-5


def test_noise_of_a_gpu_for_images_one_after_another_is_refused() -> None:
    """On the CPU a rank with one of the images has the same numbers, as a row; on a GPU it has not."""
    call = {name: each[:2] if isinstance(each, list) else each for name, each in with_images("ltx_image", None).items()}
    for kind, message in (("cuda", "one image after another"), ("cpu", "")):
        pipe = type("LTXImageToVideoPipeline", (), {"device": torch.device(kind)})()
        with pytest.raises(PlanError, match=message) if message else nullcontext(), as_one_call(pipe, call, 0, 2):
            pass


@pytest.mark.parametrize(
    ("pipeline", "name"),
    [("AceStepPipeline", "reference_audio"), ("AnimateDiffSparseControlNetPipeline", "conditioning_frames")],
)
def test_what_is_encoded_once_for_all_prompts_is_refused(pipeline: str, name: str) -> None:
    controlnet = type("ControlNet", (), {"use_simplified_condition_embedding": True})()
    pipe = type(pipeline, (), {"controlnet": controlnet})()
    call = {"prompt": PROMPTS, name: torch.zeros(2, 8), "generator": generators(3)}
    with pytest.raises(PlanError, match=rf"encodes {name} once for all prompts.*data=1"), as_one_call(pipe, call, 0, 2):
        pass


def test_frames_that_are_not_encoded_are_for_all_prompts() -> None:
    controlnet = type("ControlNet", (), {"use_simplified_condition_embedding": False})()
    pipe = type("AnimateDiffSparseControlNetPipeline", (), {"controlnet": controlnet})()
    call = {"prompt": PROMPTS, "conditioning_frames": ["frame"] * 2, "generator": None}
    with as_one_call(pipe, call, 0, 2) as own:
        assert own["conditioning_frames"] is call["conditioning_frames"]


def test_a_generator_of_prompts_on_different_ranks_is_refused() -> None:
    """Of the second prompt, it gives what comes after the noise of the first one."""
    one, other, third = generators(3)
    for shared in ([one, other, one], [one, one, other], [one, one, one]):
        with pytest.raises(PlanError, match="generator 1 of 3 is the same one as that of another prompt"):
            split_call({"prompt": PROMPTS, "generator": shared}, 1, 3)
    together = {"prompt": PROMPTS, "generator": [one, one, other]}
    assert split_call(together, 0, 2)["generator"] == [one, one]  # on the same rank
    each_twice = {"prompt": PROMPTS, "generator": [one, one, other, other, third, third], "num_images_per_prompt": 2}
    assert split_call(each_twice, 2, 3)["generator"] == [third, third]


def test_noise_of_one_generator_for_a_part_of_the_images_is_refused() -> None:
    generator = generators(1)[0]
    rows = NoiseRows(pipeline="SomePipeline", own=2, total=4, images=1, rows=lambda count: slice(0, count // 2))
    with (
        noise_of_whole_batch(generator, rows),
        pytest.raises(PlanError, match="SomePipeline samples noise for 1 rows from one generator"),
    ):
        torch.randn((1, 4, 8, 8), generator=generator)


@pytest.mark.parametrize("name", ROW_EACH)
def test_tensors_with_a_row_for_each_prompt_are_divided(name: str) -> None:
    rows = torch.arange(3.0).view(3, 1)
    assert split_call({"prompt": PROMPTS, name: rows}, 1, 2)[name].tolist() == [[2.0]]


def test_a_tensor_with_as_many_rows_as_prompts_of_unknown_meaning_is_refused() -> None:
    with pytest.raises(PlanError, match="initial_audio_waveforms is a tensor of 3 for 3 prompts"):
        split_call({"prompt": PROMPTS, "initial_audio_waveforms": torch.zeros(3, 1, 8)}, 0, 2)
    scales = torch.ones(3)
    assert split_call({"prompt": PROMPTS, "conditioning_scale": scales}, 0, 2)["conditioning_scale"] is scales


def test_latents_of_audio_that_an_earlier_call_has_returned() -> None:
    ltx = tiny.build("ltx2")
    call = ltx.call_kwargs | {"prompt": PROMPTS[:2], "num_inference_steps": 2, "output_type": "latent"}
    first = ltx.pipe(**call | {"generator": generators(2)})
    again = {name: call[name] for name in ("prompt", "num_inference_steps")} | {"generator": generators(2)}
    again |= {"latents": first.frames, "audio_latents": first.audio, "noise_scale": 0.5}
    assert error(on_all("ltx2", 2, again)[0], alone("ltx2", again)[0]) <= 1e-5


@pytest.mark.parametrize("name", ["consistency", "ddpm"])
def test_images_without_prompts_are_counted_by_the_batch_size(name: str) -> None:
    call = {"batch_size": 3, "num_inference_steps": 2, "generator": generators(1)[0], "output_type": "pt"}
    call |= {"class_labels": [1, 2, 3]} if name == "consistency" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LATENT, "output_type", "pt")
        found, want = on_all(name, 2, call)[0], alone(name, call)[0]
    assert error(torch.as_tensor(found), torch.as_tensor(want)) <= 1e-5  # diffusers 0.38 returns arrays of numpy


class Interval:
    """In place of torchsde's BrownianInterval: noise of its shape, by its seed and the time."""

    def __init__(self, size: Any, dtype: torch.dtype, entropy: int, **_: Any) -> None:
        self.size, self.dtype, self.entropy = size, dtype, entropy

    def __call__(self, start: Tensor, stop: Tensor) -> Tensor:
        seed = self.entropy % 2**31 + round(1000 * float(stop))
        noise = torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=self.dtype)
        return noise * (stop - start).abs().sqrt()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """DPM++ SDE, whose module needs torchsde."""
    torchsde = ModuleType("torchsde")
    torchsde.BrownianInterval = Interval  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchsde", torchsde)
    before = sys.modules.pop(BROWNIAN, None)
    yield importlib.import_module(BROWNIAN).DPMSolverSDEScheduler
    del sys.modules[BROWNIAN]
    if before is not None:
        sys.modules[BROWNIAN] = before


@pytest.mark.parametrize("seed", [7, None], ids=["seed", "none"])
def test_noise_of_a_tree_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch, scheduler: Any, seed: int | None) -> None:
    plain = tiny.build

    def build(name: str) -> tiny.Tiny:
        pipe = plain(name)
        pipe.pipe.scheduler = scheduler.from_config(pipe.pipe.scheduler.config, noise_sampler_seed=seed)
        return pipe

    monkeypatch.setattr(tiny, "build", build)
    call = {"prompt": PROMPTS, "num_inference_steps": 3, "generator": None, "num_images_per_prompt": 2}
    assert error(on_all("sd", 2, call)[0], alone("sd", call)[0]) <= 1e-5


def test_a_tree_for_each_row_stays_as_it_is(scheduler: Any) -> None:
    trees = importlib.import_module(BROWNIAN)
    x, rows = torch.zeros(2, 4), NoiseRows(pipeline="", own=2, total=4, images=1, rows=lambda count: slice(2, 4))
    plain = trees.BatchedBrownianTree(x, 0.0, 1.0, [3, 4])(torch.tensor(0.2), torch.tensor(0.6))
    whole = trees.BatchedBrownianTree(torch.zeros(4, 4), 0.0, 1.0, 5)(torch.tensor(0.2), torch.tensor(0.6))
    with noise_of_whole_batch(None, rows):
        of_each = trees.BatchedBrownianTree(x, 0.0, 1.0, [3, 4])(torch.tensor(0.2), torch.tensor(0.6))
        of_all = trees.BatchedBrownianTree(x, 0.0, 1.0, 5)(torch.tensor(0.2), torch.tensor(0.6))
    assert torch.equal(of_each, plain)
    assert torch.equal(of_all, whole[2:])
