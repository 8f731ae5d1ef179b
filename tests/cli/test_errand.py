"""A model is held against the verb before any worker works: what it makes, what it begins with, and who would do."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from diffusers import DiffusionPipeline, FluxImg2ImgPipeline, StableDiffusionXLPipeline, WanPipeline
from PIL import Image
from typer.testing import CliRunner

from app.workers import AppConfig, devices_of
from patchpar.cli import app
from patchpar.errors import PlanError
from patchpar.models.info import describe
from patchpar.models.task import PipelineTask, RequestedTask, purpose_of
from tests.tiny import build

VIDEO = "use `patchpar video`"
IMAGES = "use `patchpar generate`"


def folder_of(pipeline: str, folder: Path) -> Path:
    """As much of a model as tells what it is; it could not be loaded."""
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, "_diffusers_version": "0.42.0"}))
    return folder


@pytest.mark.parametrize("verb", ["video", "generate"])
def test_a_block_causal_model_is_streamed(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folder_of("WanPipeline", tmp_path / "model")
    (folder / "stream.json").write_text("{}")
    for model in (str(folder), "embedded-face"):
        result = CliRunner().invoke(app, [verb, "a fox", "--model", model])
        assert result.exit_code == 2
        assert "generates video block by block, as its stream.json says: use `patchpar stream`" in result.stderr


@pytest.mark.parametrize(
    ("words", "pipeline", "message"),
    [
        (("video", "a fox", "-o", "x.mp4"), "FluxPipeline", ["FluxPipeline, which makes images", IMAGES]),
        (("generate", "a fox"), "WanPipeline", ["WanPipeline, which makes video", VIDEO]),
        (("compare", "a fox"), "LTXPipeline", ["which makes video", VIDEO]),
        (("upscale", "small.png"), "WanPipeline", ["which makes video", VIDEO]),
        (("app", "--port", "0"), "WanPipeline", ["which makes video", VIDEO]),
        (("doctor",), "WanPipeline", ["which makes video", VIDEO]),
        (("stream", "--input", "frames", "-o", "x.mp4"), "WanPipeline", ["which makes video", VIDEO]),
        (("generate", "a song"), "StableAudioPipeline", ["which makes audio", "call it in Python"]),
        (("video", "a fox", "-o", "x.mp4"), "WanImageToVideoPipeline", ["begins with an image: add --image FILE"]),
        (("video", "a fox", "-o", "x.mp4"), "LTXImageToVideoPipeline", ["begins with an image: add --image FILE"]),
        (("video", "a fox", "-o", "x.mp4"), "WanVideoToVideoPipeline", ["begins with a video", "video=frames"]),
        (("video", "a", "--image", "small.png", "-o", "x.mp4"), "WanPipeline", ["takes no image: leave out --image"]),
        (("generate", "a fox"), "StableDiffusionXLImg2ImgPipeline", ["begins with an image: add --image FILE"]),
        (("compare", "a fox"), "FluxInpaintPipeline", ["begins with an image: add --image FILE"]),
        (("generate", "a fox", "--image", "small.png"), "FluxInpaintPipeline", ["needs a mask: add --mask FILE"]),
        (("app", "--port", "0"), "FluxImg2ImgPipeline", ["begins with an image"]),
        (("generate", "a", "--num-images", "2"), "LattePipeline", ["makes video"]),
        (
            ("generate", "a fox"),
            "FluxControlPipeline",
            ["needs control_image, which `patchpar generate` does not pass"],
        ),
        (("generate", "a", "--image", "small.png"), "FluxControlNetPipeline", ["needs control_image"]),
        (("video", "a fox", "-o", "x.mp4"), "AnimateDiffControlNetPipeline", ["needs conditioning_frames"]),
        (("doctor",), "KandinskyPipeline", ["needs image_embeds and negative_image_embeds, which `patchpar doctor`"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_the_verb_that_would_do_is_named_before_anything_is_loaded(
    words: tuple[str, ...], pipeline: str, message: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders hold no weights: whoever went on to load them would fail otherwise."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("small.png")
    Path("frames").mkdir()
    Image.new("RGB", (8, 8)).save("frames/1.png")
    monkeypatch.setattr("patchpar.launch.local.LocalExecutor", None)
    result = CliRunner().invoke(app, [*words, "--model", str(folder_of(pipeline, tmp_path / "model"))])
    assert result.exit_code == 2, result.output
    assert all(each in result.stderr for each in (pipeline, *message)), result.stderr


def test_a_model_of_the_hub_is_looked_at_when_it_is_loaded(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of it before; no call is made all the same."""
    monkeypatch.setattr(fake, "kind", "WanPipeline")
    for words in (("generate", "a fox"), ("compare", "a fox")):
        result = run(*words, "--model", "org/name", "-o", tmp_path / "x.png")
        assert result.exit_code == 2, result.output
        assert VIDEO in result.stderr
    monkeypatch.setattr(fake, "kind", "SVDPipelineOfSomebody")  # of which nothing is known
    assert run("generate", "a fox", "--model", "org/name", "-o", tmp_path / "x.png").exit_code == 0
    assert [len(pipe.calls) for pipe in fake.opened] == [0, 0, 1]


def test_the_page_looks_before_it_serves(tmp_path: Path) -> None:
    model = str(folder_of("WanPipeline", tmp_path / "model"))
    with pytest.raises(PlanError, match=VIDEO):
        AppConfig(model=model, devices=devices_of("cpu:2")).check()


def test_what_suits_is_not_refused() -> None:
    flux, wan, svd = (purpose_of(f"{name}Pipeline") for name in ("Flux", "Wan", "StableVideoDiffusion"))
    RequestedTask(verb="generate").check(flux)
    RequestedTask(verb="generate", per_prompt=4).check(flux)
    RequestedTask(verb="video", product="video").check(wan)
    RequestedTask(verb="video", product="video", has_image=True).check(svd)
    RequestedTask(verb="upscale", has_image=None).check(purpose_of("StableDiffusionXLImg2ImgPipeline"))
    for nothing_known in (None, PipelineTask(pipeline="Mine"), purpose_of("Mine"), purpose_of("Wan.Pipeline")):
        RequestedTask(verb="generate", per_prompt=2).check(nothing_known)
    with pytest.raises(
        PlanError, match="--num-images 2: this model is a LDMTextToImagePipeline, which generates one image"
    ):
        RequestedTask(verb="generate", per_prompt=2).check(purpose_of("LDMTextToImagePipeline"))


@pytest.mark.parametrize("kind", [StableDiffusionXLPipeline, WanPipeline, FluxImg2ImgPipeline])
def test_what_is_read_as_text_is_what_the_class_says(kind: type[DiffusionPipeline]) -> None:
    found = purpose_of(kind.__name__)
    assert found is not None
    signature = inspect.signature(kind.__call__).parameters.values()
    declared = {each.name: each for each in signature if each.name != "self" and each.kind is not each.VAR_KEYWORD}
    assert list(found.parameters) == list(declared)
    plain = {name: each.default for name, each in declared.items() if isinstance(each.default, (int, float, str, bool))}
    assert {name: value for name, value in found.parameters.items() if value is not None} == plain


def test_a_description_agrees(tmp_path: Path) -> None:
    model = describe(build("sdxl").pipe)
    found = purpose_of(model.pipeline)
    assert found is not None
    assert found.parameters == model.parameters
