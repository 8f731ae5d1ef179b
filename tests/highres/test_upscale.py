"""An image made larger: its size, the same on one device and on two, and messages before anything is started."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from patchpar import ParallelPipeline, PlanError, upscale
from patchpar.cli import app
from patchpar.cli.upscale import UpscaleFlags
from patchpar.cli.video import VideoFlags
from tests.tiny import build
from tests.tiny.sample_images import scene

STEPS = {"num_inference_steps": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model from text to image, made for 128 x 128 pixels."""
    path = tmp_path_factory.mktemp("sd")
    build("sd").pipe.save_pretrained(path)
    return path


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, ["upscale", *map(str, words)])


def larger(folder: Path, devices: str, **options: Any) -> tuple[Any, str]:
    """120 x 104 pixels, made 1.75 times as large, and what was chosen."""
    with ParallelPipeline.from_pretrained(folder, devices=devices, task="image-to-image") as pipe:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        found = upscale(pipe, scene(104, 120), scale=1.75, generator=generator, **STEPS, **options)
        return found, pipe.explain()


@pytest.mark.breadth
def test_the_same_on_one_device_and_on_two(folder: Path) -> None:
    """Out of windows, since 256 x 256 are large for this model; to a rounding of 8 bits."""
    one, why = larger(folder, "cpu:1")
    two, _ = larger(folder, "cpu:2")
    assert one.size == two.size == (210, 182)
    assert "2 times the native 128 x 128: structure guidance" in why
    apart = np.asarray(one).astype(int) - np.asarray(two)
    assert np.abs(apart).max() <= 1
    assert np.asarray(one).std() > 1
    stronger, _ = larger(folder, "cpu:1", strength=0.9)
    assert np.abs(np.asarray(one).astype(int) - np.asarray(stronger)).max() > 1  # the negative control


@pytest.mark.breadth
def test_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    scene().save(tmp_path / "small.png")
    flags = ["--model", folder, "--devices", "cpu:1", "--scale", 2, "--steps", 6, "-o", tmp_path / "large.png"]
    result = run(tmp_path / "small.png", "--prompt", "a small red house", *flags, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["size"], found["outputs"]) == ([256, 256], [str(tmp_path / "large.png")])
    assert Image.open(tmp_path / "large.png").size == (256, 256)
    text = run(tmp_path / "small.png", *flags)
    assert text.stdout.splitlines()[-1] == f"saved {tmp_path / 'large.png'}: 256 x 256 pixels"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.png"], "there is no such file"),
        (["text.png"], "cannot be read as an image"),
        (["small.png", "--output", "large.mp3"], "names no image format"),
        (["small.png", "--steps", 0], "--steps 0: it must be at least 1"),
        (["small.png", "--plan", "rows=2"], "unknown axis 'rows'"),
    ],
)
def test_bad_flags_cost_nothing(
    words: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scene().save("small.png")
    Path("text.png").write_text("no picture")
    monkeypatch.setattr("patchpar.launch.local.LocalExecutor.start", pytest.fail)
    result = run(*words, "--devices", "cpu:2")
    assert result.exit_code == 2
    assert message in result.stderr


def test_messages(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"task='video': use one of None, 'image-to-image'"):
        ParallelPipeline.from_pretrained(folder, task="video")
    with ParallelPipeline.from_pretrained(folder, devices="cpu:1") as pipe:
        with pytest.raises(PlanError, match="scale=1: it must be above 1"):
            upscale(pipe, scene(), scale=1)
        with pytest.raises(PlanError, match="strength=0: it must be above 0"):
            upscale(pipe, scene(), strength=0)
        with pytest.raises(PlanError, match=r"does not start from an image: load the model .*task='image-to"):
            upscale(pipe, scene())


def test_flags_are_pinned() -> None:
    """A flag once released stays; the size is the image's, so that there is none."""
    own, of_video = ({field.name for field in fields(flags)} for flags in (UpscaleFlags, VideoFlags))
    assert own - of_video == {"scale", "strength"}
    assert of_video - own == {"height", "width", "num_frames", "fps", "frames"}
