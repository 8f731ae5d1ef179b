"""The stated rule behind plan="auto", on descriptions alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from patchpar.models.description import Description, describe
from patchpar.planner.auto import choose
from tests.tiny import build


@pytest.fixture(scope="module")
def unet() -> Description:
    return describe(build("sdxl").pipe)


@pytest.fixture(scope="module")
def transformer() -> Description:
    return describe(build("qwen").pipe)


GUIDED = {"height": 512, "width": 512}
ALONE = {**GUIDED, "guidance_scale": 1.0}


@pytest.mark.parametrize(
    ("devices", "call", "plan", "why"),
    [
        (1, GUIDED, "single", "one device"),
        (2, GUIDED, "cfg=2", "guidance is on"),
        (3, GUIDED, "patch=3,strategy=exact", "3 devices are odd"),
        (4, GUIDED, "cfg=2,patch=2,strategy=exact", "2 bands"),
        (8, GUIDED, "cfg=2,patch=4,strategy=exact", "4 bands"),
        (2, ALONE, "patch=2,strategy=exact", "2 bands"),
        (5, ALONE, "patch=5,strategy=exact", "5 bands"),
        (4, {"height": 128, "width": 128}, "cfg=2,patch=2,strategy=exact", "2 bands"),
        (6, {"height": 128, "width": 128}, "cfg=2,patch=2,strategy=exact", "2 of 6 devices idle: no more bands"),
        (3, {"height": 128, "width": 128}, "cfg=2", "1 of 3 devices idle: no more bands fit"),
        (8, {"height": 64, "width": 64, "prompt": ["a"] * 4}, "data=4,cfg=2", "4 prompts over 4 groups"),
    ],
)
def test_unets(unet: Description, devices: int, call: dict[str, Any], plan: str, why: str) -> None:
    choice = choose(unet, devices, call)
    assert str(choice.plan) == plan
    assert why in choice.reason


@pytest.mark.parametrize(
    ("devices", "call", "plan", "why"),
    [
        (2, {"negative_prompt": "blurred"}, "cfg=2", "guidance is on"),
        (3, {"negative_prompt": "blurred"}, "patch=3,strategy=exact", "tokens split in 3"),
        (2, {}, "patch=2,strategy=exact", "tokens split in 2"),
        (8, {"height": 64, "width": 64, "negative_prompt": "c"}, "cfg=2,patch=2,strategy=exact", "two rows of tokens"),
        (4, {"prompt": ["a", "b"], "negative_prompt": "c"}, "cfg=2,patch=2,strategy=exact", "tokens split in 2"),
    ],
)
def test_transformers(transformer: Description, devices: int, call: dict[str, Any], plan: str, why: str) -> None:
    choice = choose(transformer, devices, GUIDED | call)
    assert str(choice.plan) == plan
    assert why in choice.reason


@pytest.mark.parametrize(
    ("devices", "call", "plan", "why"),
    [
        (2, {"negative_prompt": "blurred"}, "cfg=2", "guidance is on"),
        (3, {"negative_prompt": "blurred"}, "cfg=2", "1 of 3 devices idle: attention is linear"),
        (2, {}, "single", "of 2 devices idle: attention is linear, and there is no guidance"),
        (2, {"prompt": ["a", "b"]}, "data=2", "2 prompts over 2 groups"),
        (2, {"prompt": ["a", "b"], "image": object()}, "single", "attention is linear"),
        (4, {"prompt": ["a", "b"], "negative_prompt": "c"}, "data=2,cfg=2", "2 groups"),
    ],
)
def test_tokens_that_cannot_be_split(
    transformer: Description, devices: int, call: dict[str, Any], plan: str, why: str
) -> None:
    choice = choose(replace(transformer, splits_into_tokens=False, kept_whole="attention is linear"), devices, call)
    assert str(choice.plan) == plan
    assert why in choice.reason


def test_a_distilled_denoiser_has_one_branch(unet: Description) -> None:
    distilled = replace(unet, distilled=True)
    assert unet.guided(GUIDED)
    assert not distilled.guided(GUIDED)
    assert str(choose(distilled, 2, GUIDED).plan) == "patch=2,strategy=exact"


def test_sizes(unet: Description, transformer: Description) -> None:
    assert (unet.size_unit, transformer.size_unit) == (8, 16)
    assert unet.size({}) == (128, 128)
    assert unet.size({"height": 256}) == (256, 128)
    assert unet.size({"latents": object()}) is None
    pictures = build("sd_img2img")
    assert describe(pictures.pipe).size({"image": pictures.call_kwargs["image"].resize((64, 96))}) == (96, 64)
    assert describe(build("svd").pipe).size({}) == (576, 1024)
