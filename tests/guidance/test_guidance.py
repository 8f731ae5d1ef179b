"""Guidance on two or three ranks gives what one process gives: the same bits, or 1e-5 where the batch is divided."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from patchpar.models.info import describe
from tests import tiny
from tests.breadth import first_of
from tests.guidance import on_ranks
from tests.tensors import relative

ON_RANKS = "tests.guidance.on_ranks"
TOLERANCE = 1e-5
TWO_BRANCHES = [name for name in tiny.BATCHED if name != "instruct_pix2pix"]


@cache
def alone(name: str, **overrides: Any) -> torch.Tensor:
    return tiny.latents(tiny.build(name), **overrides)


@pytest.mark.parametrize("name", first_of(TWO_BRANCHES, "svd"))
def test_branches_in_one_call(ranks: Any, name: str) -> None:
    expected = alone(name, steps=2)
    first, second = (ran[0] for ran in ranks.run(f"{ON_RANKS}:runs", 2, name, [{"steps": 2}]))
    assert relative(first.latents, expected) <= TOLERANCE
    assert torch.equal(first.latents, second.latents)
    assert set(first.batches) == set(second.batches) == {1}


@pytest.mark.parametrize("name", first_of(tiny.SEQUENTIAL, "flux", "wan_i2v_two"))
def test_one_call_per_branch_is_bit_equal_and_half_the_work(ranks: Any, name: str) -> None:
    expected = alone(name, steps=4)
    for ran in ranks.run(f"{ON_RANKS}:runs", 2, name, [{"steps": 4}] * 2):
        assert all(torch.equal(run.latents, expected) for run in ran)
        assert [len(run.batches) for run in ran] == [5, 4]  # of 8: the first step of all shows what to expect


@pytest.mark.parametrize("name", first_of(["sdxl", "svd", "wan", "flux"], "sdxl", "wan"))
def test_without_the_exchange_the_result_is_wrong(ranks: Any, name: str) -> None:
    for ran in ranks.run(f"{ON_RANKS}:runs", 2, name, [{"steps": 3}], False):
        assert relative(ran[0].latents, alone(name, steps=3)) > 1e-2


@pytest.mark.parametrize("touch", [False, True], ids=["straight to the denoiser", "used on the way"])
@pytest.mark.parametrize("name", first_of(["sd_controlnet", "sdxl_controlnet"], "sd_controlnet"))
def test_a_controlnet_is_shared_too(ranks: Any, name: str, touch: bool) -> None:
    expected = alone(name, steps=2, num_images_per_prompt=2)
    sent = [ran[0].bytes_sent for ran in ranks.run(f"{ON_RANKS}:runs", 2, name, [{"steps": 2}])]
    for (ran, batches), unshared in zip(ranks.run(f"{ON_RANKS}:with_controlnet", 2, name, touch), sent, strict=True):
        assert relative(ran.latents, expected) <= TOLERANCE
        assert batches == ran.batches == [2, 2]  # of 4
        assert (ran.bytes_sent > 2 * unshared) == touch  # the residuals stay where they are needed


def test_three_branches_on_three_ranks(ranks: Any) -> None:
    expected = alone("instruct_pix2pix", steps=2)
    for ran in ranks.run(f"{ON_RANKS}:runs", 3, "instruct_pix2pix", [{"steps": 2}]):
        assert relative(ran[0].latents, expected) <= TOLERANCE
        assert ran[0].batches == [1, 1]


def test_three_branches_on_two_ranks_are_refused(ranks: Any) -> None:
    for ran in ranks.run(f"{ON_RANKS}:runs", 2, "instruct_pix2pix", [{"steps": 2}]):
        assert ran[0].error.startswith("PlanError")
        assert "use cfg=3" in ran[0].error
        assert ran[0].bytes_sent == 0


@pytest.mark.parametrize(
    ("name", "off"),
    first_of(
        [
            ("sdxl", {"guidance_scale": 1.0}),
            ("sd", {"guidance_scale": 0.0, "num_images_per_prompt": 2}),
            ("svd", {"max_guidance_scale": 1.0}),
            ("pixart", {"guidance_scale": 1.0}),
            ("text_to_video", {"guidance_scale": 1.0}),
            ("wan", {"guidance_scale": 1.0}),
            ("flux", {"true_cfg_scale": 1.0}),
            ("qwen", {"negative_prompt": None}),
        ],
        ("sdxl", {"guidance_scale": 1.0}),
        ("qwen", {"negative_prompt": None}),
    ),
)
def test_no_guidance_to_split(ranks: Any, name: str, off: dict[str, Any]) -> None:
    for first, second in ranks.run(f"{ON_RANKS}:runs", 2, name, [off, {"steps": 2}]):
        assert first.error.startswith("PlanError")
        assert "guidance_scale" in first.error
        assert "cfg=1" in first.error
        assert first.bytes_sent == 0
        assert relative(second.latents, alone(name, steps=2)) <= TOLERANCE  # the next call works


@pytest.mark.parametrize("name", first_of(["sdxl", "wan"], "wan"))
def test_one_step(ranks: Any, name: str) -> None:
    for ran in ranks.run(f"{ON_RANKS}:runs", 2, name, [{"steps": 1}] * 2):
        assert all(relative(run.latents, alone(name, steps=1)) <= TOLERANCE for run in ran)


@pytest.mark.parametrize("name", first_of(["sdxl", "qwen", "animatediff"], "qwen"))
def test_calls_that_differ(ranks: Any, name: str) -> None:
    calls = [
        {"steps": 2, "seed": 1},
        {"steps": 3, "prompt": "two tall pines by a lake", "height": 64, "width": 160},
        {"steps": 2, "prompt": "a boat", "negative_prompt": "fog", "seed": 3},
    ]
    for ran in ranks.run(f"{ON_RANKS}:runs", 2, name, calls):
        errors = [relative(run.latents, alone(name, **call)) for run, call in zip(ran, calls, strict=True)]
        assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("name", first_of(["sdxl", "animatediff", "sdxl_controlnet"], "animatediff"))
def test_several_images(ranks: Any, name: str) -> None:
    call = {"steps": 2, "prompt": ["a red house", "a blue boat"] if name == "animatediff" else "a red house"}
    call |= {} if name == "animatediff" else {"num_images_per_prompt": 2}
    expected = tiny.latents(tiny.build(name), **call)
    for ran in ranks.run(f"{ON_RANKS}:runs", 2, name, [call]):
        assert relative(ran[0].latents, expected) <= TOLERANCE
        assert set(ran[0].batches) == {2}


def test_several_images_with_one_call_per_branch_are_bit_equal(ranks: Any) -> None:
    call = {"steps": 3, "prompt": ["a red house", "a blue boat"], "negative_prompt": ["fog", "rain"]}
    expected = tiny.latents(tiny.build("flux"), **call)
    for ran in ranks.run(f"{ON_RANKS}:runs", 2, "flux", [call]):
        assert torch.equal(ran[0].latents, expected)


def test_an_extra_call_beside_the_batched_one(ranks: Any) -> None:
    """Guidance that skips layers makes a second, single call in some steps."""
    call = {"steps": 3, "skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 0.7}
    expected = tiny.latents(tiny.build("sd3"), **call)
    first, second = ranks.run(f"{ON_RANKS}:runs", 2, "sd3", [call])
    assert relative(expected, alone("sd3", steps=3)) > 1e-3
    assert relative(first[0].latents, expected) <= TOLERANCE
    assert torch.equal(first[0].latents, second[0].latents)


def test_guidance_that_ends_part_way(ranks: Any) -> None:
    pipe = tiny.build("wan")
    expected = tiny.latents(pipe, steps=4, callback_on_step_end=on_ranks.set_scale(1.0))
    assert not torch.equal(expected, alone("wan", steps=4))
    for ran in ranks.run(f"{ON_RANKS}:scale_set_later", 2, "wan", 1.0, [0, 1]):
        assert torch.equal(ran.latents, expected)


def test_a_batch_that_is_halved_part_way(ranks: Any) -> None:
    inputs = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    expected = tiny.latents(tiny.build("sd"), steps=4, callback_on_step_end=on_ranks.drop_guidance, **inputs)
    for ran in ranks.run(f"{ON_RANKS}:dropped", 2):
        assert relative(ran.latents, expected) <= TOLERANCE


def test_ranks_that_part_are_told(ranks: Any) -> None:
    """Guidance ends on rank 1 only: rank 0 waits for a call that rank 1 never makes."""
    first, _ = ranks.run(f"{ON_RANKS}:scale_set_later", 2, "wan", 1.0, [1])
    assert first.error.startswith("ExchangeError")
    assert "step 1, call 1" in first.error


def test_a_message_of_another_step_is_told(ranks: Any) -> None:
    first, second = ranks.run(f"{ON_RANKS}:stray", 2)
    assert "rank 0 is at guidance, step 0, call 0, rank 1 at step 1, call 0" in first
    assert "rank 1 is at guidance, step 1, call 0, rank 0 at step 0, call 0" in second


def test_an_output_of_unforeseen_shape_is_told(ranks: Any) -> None:
    first, second = ranks.run(f"{ON_RANKS}:unforeseen", 2)
    assert first[-1].startswith("UnsupportedModel")
    assert second[-1].startswith(("UnsupportedModel", "ExchangeError"))


@pytest.mark.parametrize("sequential", [False, True], ids=["one call", "call per branch"])
@pytest.mark.parametrize("as_tuple", [False, True], ids=["dataclass", "tuple"])
def test_what_the_denoiser_returns(ranks: Any, as_tuple: bool, sequential: bool) -> None:
    name, rest = ("tuple", (None, 3)) if as_tuple else ("UNet2DConditionOutput", False)
    assert ranks.run(f"{ON_RANKS}:outputs_of", 2, as_tuple, sequential) == [[(name, True, rest)] * 3] * 2


@pytest.mark.parametrize("name", first_of(["sdxl", "wan"], "sdxl"))
def test_beside_another_axis(ranks: Any, name: str) -> None:
    for ran in ranks.run(f"{ON_RANKS}:beside_patches", 4, name):
        assert relative(ran.latents, alone(name, steps=2)) <= TOLERANCE


@pytest.mark.parametrize("name", first_of(["sdxl", "wan"], "sdxl"))
def test_through_torch_distributed(ranks: Any, name: str) -> None:
    for ran in ranks.run(f"{ON_RANKS}:runs", 2, name, [{"steps": 3}], through="torch"):
        assert relative(ran[0].latents, alone(name, steps=3)) <= TOLERANCE


def test_what_says_that_a_call_is_guided() -> None:
    """A scale for each step, as Ideogram 4 has it; a guidance scale beside a true one, as in Chroma's inpainting."""
    model = describe(tiny.build("flux").pipe)
    assert not model.guided({"guidance_scale": 3.5})
    assert model.guided({"negative_prompt": "fog", "true_cfg_scale": 2.0})
    itself = replace(model, guided_by_its_scale=True, distilled=False)
    assert itself.guided({"guidance_scale": 3.5})
    assert not itself.guided({"guidance_scale": 1.0})
    by_step = replace(model, parameters={"guidance_scale": None, "guidance_schedule": (7.0, 3.0)}, distilled=False)
    assert by_step.guided({})
    assert not by_step.guided({"guidance_schedule": None, "guidance_scale": 1.0})
