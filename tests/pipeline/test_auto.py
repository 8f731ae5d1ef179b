"""The stated rule behind plan="auto", on descriptions alone."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from patchpar.models.info import NetworkInfo, PipelineInfo, describe
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.validate import check_plan_for
from patchpar.plan.mesh_shape import EXCHANGE, Workload
from patchpar.plan.plan import Plan
from tests.tiny import build


@pytest.fixture(scope="module")
def unet() -> PipelineInfo:
    return describe(build("sdxl").pipe)


@pytest.fixture(scope="module")
def transformer() -> PipelineInfo:
    return describe(build("qwen").pipe)


GUIDED = {"height": 512, "width": 512}
ALONE = {**GUIDED, "guidance_scale": 1.0}


@pytest.mark.parametrize(
    ("devices", "call", "plan", "why"),
    [
        (1, GUIDED, "single", "one device"),
        (2, GUIDED, "cfg=2", "guidance is on"),
        (3, GUIDED, "patch=3,strategy=exact", "3 is odd"),
        (4, GUIDED, "cfg=2,patch=2,strategy=exact", "2 bands"),
        (8, GUIDED, "cfg=2,patch=4,strategy=exact", "4 bands"),
        (2, ALONE, "patch=2,strategy=exact", "2 bands"),
        (5, ALONE, "patch=4,strategy=exact", "1 of 5 devices idle: no distribution over more devices is faster"),
        (8, ALONE, "patch=8,strategy=exact", "8 bands"),
        (5, GUIDED, "cfg=2,patch=2,strategy=exact", "1 of 5 devices idle: no distribution over more devices is faster"),
        (7, GUIDED, "cfg=2,patch=3,strategy=exact", "guidance is on.*3 bands; 1 of 7 devices idle"),
        (4, {"height": 128, "width": 128}, "cfg=2,patch=2,strategy=exact", "2 bands"),
        (
            6,
            {"height": 128, "width": 128},
            "cfg=2,patch=2,strategy=exact",
            "2 of 6 devices idle: the image has no more bands",
        ),
        (3, {"height": 128, "width": 128}, "cfg=2", "1 of 3 devices idle: no distribution over more devices is faster"),
        (8, {"height": 64, "width": 64, "prompt": ["a"] * 4}, "data=4,cfg=2", "4 prompts over 4 groups"),
        (4, {**GUIDED, "prompt": ["a"] * 4}, "data=4", "4 prompts over 4 groups, which exchange nothing"),
        (8, {**GUIDED, "prompt": ["a"] * 4}, "data=4,cfg=2", "4 prompts over 4 groups.*guidance is on"),
        (4, {**GUIDED, "prompt": ["a"] * 3}, "cfg=2,patch=2,strategy=exact", "2 bands"),
        (4, {**GUIDED, "prompt": ["a"] * 6}, "data=2,cfg=2", "6 prompts over 2 groups"),
        (
            4,
            {**GUIDED, "prompt": ["a"] * 4, "callback_on_step_end": print},
            "cfg=2,patch=2,strategy=exact",
            "in one batch",
        ),
        (
            4,
            {**GUIDED, "prompt": ["a"] * 4, "mine": [1] * 4},
            "cfg=2,patch=2,strategy=exact",
            "in one batch: mine is a list",
        ),
    ],
)
def test_unets(unet: PipelineInfo, devices: int, call: dict[str, Any], plan: str, why: str) -> None:
    choice = choose(unet, devices, call)
    assert str(choice.plan) == plan
    assert re.search(why, choice.reason)


@pytest.mark.parametrize(
    ("devices", "call", "plan", "why"),
    [
        (2, {"negative_prompt": "blurred"}, "cfg=2", "guidance is on"),
        (3, {"negative_prompt": "blurred"}, "patch=3,strategy=exact", "tokens split in 3"),
        (2, {}, "patch=2,strategy=exact", "tokens split in 2"),
        (8, {"height": 64, "width": 64, "negative_prompt": "c"}, "cfg=2,patch=2,strategy=exact", "two rows of tokens"),
        (4, {"prompt": ["a", "b"], "negative_prompt": "c"}, "data=2,cfg=2", "2 prompts over 2 groups"),
        (4, {"prompt": ["a", "b"]}, "data=2,patch=2,strategy=exact", "2 groups.*tokens split in 2"),
    ],
)
def test_transformers(transformer: PipelineInfo, devices: int, call: dict[str, Any], plan: str, why: str) -> None:
    choice = choose(transformer, devices, GUIDED | call)
    assert str(choice.plan) == plan
    assert re.search(why, choice.reason)


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
    transformer: PipelineInfo, devices: int, call: dict[str, Any], plan: str, why: str
) -> None:
    choice = choose(replace(transformer, splits_into_tokens=False, unsplit_reason="attention is linear"), devices, call)
    assert str(choice.plan) == plan
    assert re.search(why, choice.reason)


@pytest.mark.parametrize("prompts", [1, 2, 3, 5])
@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("devices", range(1, 9))
def test_no_shape_is_sooner_than_the_one_taken(prompts: int, branches: int, devices: int) -> None:
    """The rule, said again: the busiest rank's prompts, branches and rows, and what it fetches."""
    work = Workload(prompts=prompts, branches=branches, most_bands=8, units=16)
    taken = work.soonest(devices)
    assert taken.world_size <= devices

    def step(data: int, cfg: int, patch: int) -> float:
        rows = math.ceil(16 / patch) / 16
        return math.ceil(prompts / data) * (branches // cfg) * (rows + EXCHANGE * (patch - 1) / patch)

    every = itertools.product(range(1, prompts + 1), {1, branches}, range(1, 9))
    soonest = min(step(*shape) for shape in every if math.prod(shape) <= devices)
    assert step(taken.data, taken.cfg, taken.patch) == pytest.approx(soonest)


@pytest.mark.parametrize(
    ("devices", "call", "plan", "why"),
    [
        (2, {}, "patch=2,strategy=exact", "2 devices cannot be divided by 3 branches"),
        (3, {}, "cfg=3", "one branch for each third of the devices"),
        (6, {}, "cfg=3,patch=2,strategy=exact", "each third.*2 bands"),
        (2, {"guidance_scale": 1.0}, "cfg=2", "each half"),
        (2, {"pag_scale": 0.0}, "cfg=2", "each half"),
        (2, {"pag_scale": 0.0, "guidance_scale": 1.0}, "patch=2,strategy=exact", "2 bands"),
    ],
)
def test_perturbed_attention_adds_a_branch(
    unet: PipelineInfo, devices: int, call: dict[str, Any], plan: str, why: str
) -> None:
    model = replace(unet, parameters={**unet.parameters, "pag_scale": 3.0})
    choice = choose(model, devices, GUIDED | call)
    assert str(choice.plan) == plan
    assert re.search(why, choice.reason)
    check_plan_for(model, choice.plan, GUIDED | call)


def test_a_scale_for_the_image_adds_a_branch() -> None:
    found = build("instruct_pix2pix")
    assert [str(choose(describe(found.pipe), devices, found.call_kwargs).plan) for devices in (2, 3)] == [
        "patch=2,strategy=exact",
        "cfg=3",
    ]


@pytest.mark.parametrize(("devices", "plan"), [(2, "patch=2,strategy=exact"), (3, "cfg=3")])
def test_so_does_one_for_several_images(unet: PipelineInfo, devices: int, plan: str) -> None:
    """OmniGen has one prediction without text but with its images, if it is given any."""
    model = replace(unet, parameters={**unet.parameters, "img_guidance_scale": 1.6})
    call = {**GUIDED, "input_images": [object()]}
    assert str(choose(model, devices, call).plan) == plan
    assert str(choose(model, 2, GUIDED).plan) == "cfg=2"


def test_a_pipeline_without_a_denoiser_leaves_devices_idle(transformer: PipelineInfo) -> None:
    model = replace(transformer, denoisers=(), splits_into_tokens=False)
    reason = choose(model, 2, {}).reason
    assert reason == "1 of 2 devices idle: a pipeline without a denoiser cannot be split"


def test_a_scheduler_with_noise_of_its_own_keeps_prompts_together(unet: PipelineInfo) -> None:
    call = {**GUIDED, "prompt": ["a"] * 4}
    kept = choose(replace(unet, one_batch_reason="its scheduler draws for all"), 4, call)
    assert str(kept.plan) == "cfg=2,patch=2,strategy=exact"
    assert "4 prompts stay in one batch: its scheduler draws for all" in kept.reason


def test_a_generator_of_several_prompts_keeps_them_together(unet: PipelineInfo) -> None:
    one, other = torch.Generator(), torch.Generator()
    assert choose(unet, 2, {**GUIDED, "prompt": ["a"] * 2, "generator": [one, other]}).plan == Plan(data=2)
    kept = choose(unet, 2, {**GUIDED, "prompt": ["a"] * 2, "generator": [one, one]})
    assert str(kept.plan) == "cfg=2"
    assert "2 prompts stay in one batch: generator 1 of 2 is the same one as that of another prompt" in kept.reason


@pytest.mark.parametrize(
    ("pipeline", "network", "default", "with_it", "without"),
    [
        ("GlmImagePipeline", "vision_language_encoder", {}, {}, {"prompt": ["a"]}),
        ("LongCatImagePipeline", "text_encoder", {"enable_prompt_rewrite": True}, {}, {"enable_prompt_rewrite": False}),
        ("ErnieImagePipeline", "pe", {"use_pe": True}, {"use_pe": True}, {"use_pe": False}),
        ("Flux2Pipeline", "text_encoder", {}, {"caption_upsample_temperature": 0.2}, {}),
    ],
)
def test_tokens_that_a_language_model_samples_keep_prompts_together(
    unet: PipelineInfo,
    pipeline: str,
    network: str,
    default: dict[str, Any],
    with_it: dict[str, Any],
    without: dict[str, Any],
) -> None:
    parameters = {**unet.parameters, **default}
    model = replace(
        unet,
        pipeline=pipeline,
        networks={network: NetworkInfo(kind="m.Some", methods=frozenset())},
        parameters=parameters,
    )
    call = {**GUIDED, "prompt": ["a"] * 2}
    kept = choose(model, 2, call | with_it)
    assert str(kept.plan) == "cfg=2"
    assert f"2 prompts stay in one batch: {pipeline} samples tokens" in kept.reason
    assert "samples tokens" not in choose(model, 2, call | without).reason
    assert choose(replace(model, networks={}), 2, call | with_it).plan == Plan(data=2)


def test_sizes_that_prompts_get_in_turn_keep_them_together(unet: PipelineInfo) -> None:
    sizes = {"negative_original_size": (64, 64), "negative_target_size": (128, 128)}
    kept = choose(unet, 2, {**GUIDED, "prompt": ["a"] * 2, **sizes})
    assert str(kept.plan) == "cfg=2"
    assert "2 prompts stay in one batch: negative_original_size" in kept.reason


def test_a_class_that_hands_its_arguments_on_has_those_of_its_parent(unet: PipelineInfo) -> None:
    pipe = build("sdxl").pipe

    class Mine(type(pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, strength_of_mine: float = 0.5, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class MineOfMine(Mine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    pipe.__class__ = MineOfMine
    described = describe(pipe)
    assert described.parameters == {"strength_of_mine": 0.5, **unet.parameters}
    assert described.guided(GUIDED)
    assert described.takes_any
    assert str(choose(described, 2, GUIDED).plan) == "cfg=2"
    assert str(choose(described, 2, ALONE).plan) == "patch=2,strategy=exact"


def test_a_class_that_says_nothing_of_its_arguments_is_believed_what_it_is_given(unet: PipelineInfo) -> None:
    silent = replace(unet, parameters={}, takes_any=True)
    assert silent.guided({"guidance_scale": 5.0})
    assert not silent.guided({"guidance_scale": 1.0})
    assert not silent.guided({})


def test_a_distilled_denoiser_has_one_branch(unet: PipelineInfo) -> None:
    distilled = replace(unet, distilled=True)
    assert unet.guided(GUIDED)
    assert not distilled.guided(GUIDED)
    assert str(choose(distilled, 2, GUIDED).plan) == "patch=2,strategy=exact"


def test_sizes(unet: PipelineInfo, transformer: PipelineInfo) -> None:
    assert (unet.size_unit, transformer.size_unit) == (8, 16)
    assert unet.size({}) == (128, 128)
    assert unet.size({"height": 256}) == (256, 128)
    assert unet.size({"latents": object()}) is None
    images = build("sd_img2img")
    assert describe(images.pipe).size({"image": images.call_kwargs["image"].resize((64, 96))}) == (96, 64)
    assert describe(build("svd").pipe).size({}) == (576, 1024)


def test_a_pipeline_without_a_vae_denoises_pixels() -> None:
    """Bands are counted in its own rows."""
    pixels = describe(build("if_text").pipe)
    assert (pixels.vae_scale, pixels.size({})) == (1, (32, 32))
    check_plan_for(pixels, Plan(patch=4), {"prompt": "a fox", "height": 32, "width": 32})
    assert describe(build("kandinsky3").pipe).vae_scale == 8
