"""`--image`, `--mask`, `--lora` and `--scheduler`: what they pass on, what they load, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from PIL import Image

from patchpar.cli.input_images import InputImages
from patchpar.cli.pipeline_changes import LoraFlag, change_pipeline, scheduler_name
from patchpar.cli.stream.images import ImageFrames
from patchpar.errors import PlanError
from patchpar.models.loading import for_task
from patchpar.models.task import RequestedTask
from tests.tiny import build

LORA, LONG = "ink.safetensors", "x" * 300


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, size in (("a.png", (64, 48)), ("mask.png", (32, 32))):
        Image.new("RGB", size, (200, 10, 10)).save(tmp_path / name)
    (tmp_path / LORA).touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


def folder_of(pipeline: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, "_diffusers_version": "0.42.0"}))
    return folder


def test_an_image_and_a_mask_are_passed_on_in_one_size(fake: Any, run: Any, files: Path) -> None:
    flags = ("--image", "a.png", "--mask", "mask.png", "--strength", 0.5, "--width", 32, "--height", 40)
    assert run("generate", "a fox", *flags).exit_code == 0
    (pipe,) = fake.opened
    (call,) = pipe.calls
    assert pipe.options["task"] == "inpainting"
    assert (call["image"].size, call["mask_image"].size, call["mask_image"].mode) == ((32, 40), (32, 40), "L")
    assert call["strength"] == 0.5


def test_home_is_found_where_the_shell_leaves_it_to_us(
    fake: Any, run: Any, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell expands `--image ~/a.png`, and not `--image=~/a.png`."""
    monkeypatch.setenv("HOME", str(files))
    found = run("generate", "a fox", "--image=~/a.png", "--output=~/out.png")
    assert (found.exit_code, (files / "out.png").is_file()) == (0, True), found.output
    assert [frame.size for frame in ImageFrames.of(Path("~"), None)][:1] == [(64, 48)]


def test_a_model_that_takes_images_is_loaded_as_it_is(files: Path) -> None:
    task = RequestedTask(verb="generate", has_image=True, converts=True)
    assert task.task_for(folder_of("FluxPipeline", files / "flux"), {}) == {"task": "image-to-image"}
    assert task.task_for(folder_of("QwenImageEditPipeline", files / "edit"), {}) == {}
    assert task.task_for(folder_of("FluxControlNetPipeline", files / "control"), {}) == {"task": "image-to-image"}
    assert RequestedTask(verb="generate").task_for("nowhere", {}) == {}


def test_a_call_without_a_size_has_that_of_its_image() -> None:
    images, call = InputImages(image=Image.new("RGB", (8, 8))), {"prompt": "a", "height": 8, "width": 8}
    assert set(images.arguments(call, {"prompt": None, "image": None})) == {"prompt", "image"}
    assert set(images.arguments(call, {})) == {"prompt", "height", "width", "image"}
    assert InputImages().arguments(call, {"prompt": None}) == call
    masked = InputImages(image=Image.new("RGB", (16, 8)), mask=Image.new("L", (16, 8)))
    found = masked.arguments({"prompt": "a"}, {"height": None, "width": None})
    assert (found["height"], found["width"]) == (8, 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--image", "b.png"), "--image b.png: there is no such file"),
        (("--image", "."), "--image .: it is a folder; name a file"),
        (("--image", "/dev/null"), "--image /dev/null: it is a pipe or a device; name a file"),
        (("--image", "a.png", "--mask", LONG), "is no valid path: File name too long"),
        (("--image", "~nobodyhere/a.png"), "is no valid path: Could not determine home directory"),
        (("--mask", "mask.png"), "--mask says which part of an image is generated anew: add --image FILE"),
        (("--strength", 0.4), "--strength says how much of an image is changed: add --image FILE"),
        (("--image", "a.png", "--strength", 1.4), "--strength 1.4: it must be above 0 and at most 1"),
        (("--lora", "a.png:much"), "--lora a.png:much: the scale after the colon is a number, such as a.png:0.8"),
        (("--lora", "a.png:nan"), "the scale must be finite"),
        (("--lora", "no such/file/here:1"), "there is no such file or folder"),
        (("--lora", LONG), "is no valid path: File name too long"),
        (("--lora", "~nobodyhere/a.safetensors:1"), "is no valid path: Could not determine home directory"),
        (("--lora", "empty:0.5"), "--lora: empty has no weights as safetensors"),
        (("--lora", "a.png"), "--lora: a.png is no safetensors file"),
        (("--scheduler", "EulerDiscret"), "diffusers has none of that name; use EulerDiscreteScheduler"),
        (("--scheduler", "Foo"), "diffusers has none of that name; its docs list them"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_before_workers_start(
    fake: Any, run: Any, files: Path, flags: tuple[Any, ...], message: str
) -> None:
    for verb in ("generate", "compare"):
        result = run(verb, "a fox", *flags)
        assert (result.exit_code, message in result.stderr) == (2, True), result.output
    assert fake.opened == []


def test_loras_are_a_path_or_a_name_with_a_scale(files: Path) -> None:
    assert LoraFlag.parse(LORA) == (LORA, 1.0)
    assert LoraFlag.parse(f"{LORA}:0.5") == (LORA, 0.5)
    assert LoraFlag.parse("org/name:-1") == ("org/name", -1.0)
    Path("with:1").mkdir()
    Path("with:1", LORA).touch()
    assert LoraFlag.parse("with:1") == ("with:1", 1.0)


def test_loras_are_loaded_and_mixed(files: Path) -> None:
    calls = list[tuple[Any, ...]]()
    pipe = SimpleNamespace(
        load_lora_weights=lambda *args, **kwargs: calls.append((*args, kwargs)),
        set_adapters=lambda *args: calls.append(args),
    )
    change_pipeline(pipe, [f"{LORA}:0.5", "org/name"], None)
    loaded = [(".", {"adapter_name": "lora0", "weight_name": LORA}), ("org/name", {"adapter_name": "lora1"})]
    assert calls == [*loaded, (["lora0", "lora1"], [0.5, 1.0])]


def test_a_scheduler_takes_the_settings_of_the_models_own() -> None:
    assert scheduler_name("EulerDiscrete") == "EulerDiscreteScheduler"
    pipe = SimpleNamespace(scheduler=DDIMScheduler(beta_end=0.5))
    change_pipeline(pipe, None, "EulerDiscrete")
    assert isinstance(pipe.scheduler, EulerDiscreteScheduler)
    assert pipe.scheduler.config.beta_end == 0.5
    with pytest.raises(PlanError, match=r"this model is for schedulers of another kind: use one of .*DDIMScheduler"):
        change_pipeline(pipe, None, "FlowMatchEulerDiscreteScheduler")


@pytest.mark.parametrize(("task", "kind"), [("image-to-image", "Img2Img"), ("inpainting", "Inpaint")])
def test_the_networks_are_those_of_the_model(task: str, kind: str) -> None:
    pipe = build("sdxl").pipe
    found = for_task(pipe, task)
    assert type(found) is getattr(diffusers, f"StableDiffusionXL{kind}Pipeline")
    assert found.unet is pipe.unet


@pytest.mark.breadth
def test_part_of_an_image_is_generated_anew(run: Any, files: Path) -> None:
    """By the embedded model on two workers: outside the mask the image stays."""
    Image.new("RGB", (128, 128), (40, 120, 200)).save("sky.png")
    mask = np.zeros((128, 128), np.uint8)
    mask[:, 64:] = 255
    Image.fromarray(mask).save("right.png")
    words = ("--image", "sky.png", "--mask", "right.png", "--strength", 1, "--steps", 6, "--devices", "cpu:2")
    result = run("generate", "a red house on the right", *words, "--scheduler", "DDIM", "-o", "out.png")
    assert result.exit_code == 0, result.output
    found = np.asarray(Image.open("out.png")).astype(int)
    change = np.abs(found - np.asarray(Image.open("sky.png"))).mean((0, 2))
    assert change[:48].mean() < 15 < change[80:].mean()
