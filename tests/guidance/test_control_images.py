"""Prompts on several ranks, with images for several ControlNets: each prompt has those that one call gives it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from diffusers import FluxMultiControlNetModel, MultiControlNetModel

from patchpar.errors import PlanError
from patchpar.strategies.data.split import as_one_call, split_call
from tests import tiny
from tests.breadth import first_of
from tests.tiny import sample_images

from .test_data import PROMPTS, alone, error, generators, on_all

NETS = {"sd_controlnet": MultiControlNetModel, "flux_controlnet_img2img": FluxMultiControlNetModel}
GUIDING = {"sd_controlnet": "image", "flux_controlnet_img2img": "control_image"}


def images(count: int) -> list[Any]:
    return [sample_images.scene().rotate(90 * turns) for turns in range(count)]


A, B, C, D = images(4)
CASES = {
    "one for all prompts": ("sd_controlnet", [A, B]),
    "one each, by prompt": ("sd_controlnet", [[A, B], [C, D]]),
    "one for all, of tokens": ("flux_controlnet_img2img", [A, B]),
    "one each, by ControlNet": ("flux_controlnet_img2img", [[A, B], [C, D]]),
    "one for all, and one each": ("flux_controlnet_img2img", [A, [C, D]]),
}


@pytest.fixture
def two_controlnets(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny.build

    def build(name: str) -> tiny.Tiny:
        built = plain(name)
        if name == "sd_controlnet":  # a new one hardly looks at its image
            built.pipe.controlnet.controlnet_cond_embedding.conv_out.weight.data.mul_(1e5)
        built.pipe.controlnet = NETS[name]([built.pipe.controlnet, copy.deepcopy(built.pipe.controlnet)])
        return built

    monkeypatch.setattr(tiny, "build", build)


@pytest.mark.parametrize("case", first_of(CASES, "one for all prompts", "one each, by ControlNet"))
@pytest.mark.usefixtures("two_controlnets")
def test_each_prompt_has_the_images_of_one_call(case: str) -> None:
    """Two ControlNets and two prompts: a list of two images is one for each ControlNet."""
    name, given = CASES[case]
    call = {"prompt": PROMPTS[:2], "num_inference_steps": 2, "generator": generators(1)[0], GUIDING[name]: given}
    call["controlnet_conditioning_scale"] = [1.0, 2.0]
    if name != "sd_controlnet":
        call |= {"image": images(2), "control_mode": [None, None]}  # without modes diffusers calls no ControlNet
    expected, _ = alone(name, call)
    assert error(on_all(name, 2, call)[0], expected) <= 1e-5
    others, _ = alone(name, call | {GUIDING[name]: given[::-1]})
    assert error(others, expected) > 1e-3


class Guided:
    """A pipeline whose ControlNets get images."""

    def __init__(self, kind: str) -> None:
        self.controlnet = type(kind, (), {"nets": ()} if kind.startswith("Multi") else {})()


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("MultiControlNetModel", [["a", "b"], "c"], "an entry of image has 2 images for 3 prompts: give one for all"),
        ("MultiControlNetUnionModel", [["a", "b"], ["c"]], "lists of images for the modes of each ControlNet.*data=1"),
    ],
)
def test_images_whose_prompt_is_unknown_are_refused(kind: str, given: list[Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split_call({"prompt": PROMPTS, "image": given}, 0, 3, Guided(kind))


def test_images_for_the_modes_of_one_controlnet_are_of_all_prompts() -> None:
    call = {"prompt": PROMPTS[:2], "control_image": ["edges", "depth"], "control_mode": [0, 3]}
    with as_one_call(Guided("ControlNetUnionModel"), call, 1, 2) as own:
        assert own == call | {"prompt": PROMPTS[1:2]}
