"""`patchpar video`: what is asked of the pipeline, the file that comes out, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.cli.video import VideoFlags, saved
from patchpar.cli.video_file import save_video
from patchpar.errors import PlanError
from patchpar.media.video_file import frames_of
from tests.cli.test_real import patchpar
from tests.tiny import build

SIZE = ("--height", "128", "--width", "128")


def decoded(path: Path) -> list[np.ndarray[Any, Any]]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    build("wan").pipe.save_pretrained(folder)
    return folder


def test_two_workers_make_a_video(run: Any, wan_folder: Path, tmp_path: Path) -> None:
    target, images = tmp_path / "a.mp4", tmp_path / "frames"
    words = ("--model", wan_folder, "--devices", "cpu:2", "--plan", "cfg=2", "--steps", 2, "--num-frames", 5, *SIZE)
    result = run("video", "a boat", *words, "--fps", 8, "-o", target, "--frames", images)
    assert result.exit_code == 0, result.stderr
    line, saved, also = result.stdout.strip().splitlines()
    assert "cfg=2" in line
    assert saved == f"saved {target}: 5 frames, 0.6 s"
    assert also == f"saved 5 frames in {images}"
    frames = decoded(target)
    assert [frame.shape for frame in frames] == [(128, 128, 3)] * 5
    exact = [np.asarray(Image.open(path)) for path in sorted(images.iterdir())]
    assert sorted(path.name for path in images.iterdir())[:2] == ["frame-0001.png", "frame-0002.png"]
    assert len(exact) == 5
    assert np.abs(np.stack(exact).astype(float) - np.stack(frames)).mean() < 12  # noise is hard to encode
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "frames"}


@pytest.mark.breadth
def test_json(wan_folder: Path, tmp_path: Path) -> None:
    words = ("--model", wan_folder, "--devices", "cpu", "--steps", 1, "--num-frames", 5, *SIZE, "--json")
    result = patchpar("video", "a boat", *words, "-o", tmp_path / "a.webm")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["frames"], found["fps"], found["outputs"]) == (5, 16, [str(tmp_path / "a.webm")])
    assert len(decoded(tmp_path / "a.webm")) == 5


@pytest.mark.breadth
def test_a_model_that_goes_on_from_an_image(tmp_path: Path) -> None:
    build("svd").pipe.save_pretrained(tmp_path / "svd")
    Image.new("RGB", (128, 128), "teal").save(tmp_path / "first.png")
    words = ("--model", tmp_path / "svd", "--devices", "cpu:2", "--plan", "patch=2", "--steps", 2, "--num-frames", 3)
    result = patchpar("video", "--image", tmp_path / "first.png", *words, *SIZE, "-o", tmp_path / "a.mp4")
    assert result.returncode == 0, result.stderr
    assert len(decoded(tmp_path / "a.mp4")) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a",), "Missing option '--model'"),
        (("--model", "m"), "nothing to generate"),
        (("a", "--model", "m", "-o", "x.gif"), "names no video format; use one of .mp4, .mkv, .webm"),
        (("a", "--model", "m", "-o", "no/such/x.mp4"), "there is no folder no/such"),
        (("a", "--model", "m", "--num-frames", "0"), "--num-frames 0: it must be at least 1"),
        (("a", "--model", "m", "--fps", "0"), "--fps 0: it must be at least 1"),
        (("a", "--model", "m", "--fps", "10000000"), "--fps 10000000: it must be at most 1000"),
        (("a", "--model", "m", "--guidance-scale", "nan"), "--guidance-scale nan: it must be a finite number"),
        (("--model", "m", "--image", "none.png"), "--image none.png: there is no such file"),
    ],
)
def test_bad_use(words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["video", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_an_image_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "first.png").write_text("no picture")
    result = CliRunner().invoke(
        app, ["video", "--model", "m", "--image", str(tmp_path / "first.png"), "-o", str(tmp_path / "a.mp4")]
    )
    assert result.exit_code == 2
    assert "cannot be read as an image" in result.stderr


def test_a_model_that_generates_images() -> None:
    with pytest.raises(PlanError, match=r"has no frames: `patchpar generate` generates images"):
        frames_of(SimpleNamespace(images=[]))


@pytest.mark.parametrize("kind", ["array", "tensor", "pictures"])
def test_frames_of_every_kind_of_output(kind: str) -> None:
    values = np.linspace(0, 1, 2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    bytes_of = (values * 255).round().astype(np.uint8)
    given: Any = {
        "array": values[None],
        "tensor": torch.from_numpy(values).permute(0, 3, 1, 2)[None],
        "pictures": [[Image.fromarray(frame) for frame in bytes_of]],
    }[kind]
    found = frames_of(SimpleNamespace(frames=given))
    assert found is not None
    assert np.array_equal(found, bytes_of)


def test_under_torchrun_other_ranks_have_none() -> None:
    assert frames_of(SimpleNamespace(frames=None)) is None


@pytest.mark.parametrize(("height", "width"), [(7, 8), (8, 7)])
def test_odd_sides_are_refused_and_nothing_is_left(height: int, width: int, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"{height} x {width}, but video codecs need even sides: save PNGs with --fr"):
        save_video(np.zeros((2, height, width, 3), np.uint8), tmp_path / "a.mp4", 8)
    assert list(tmp_path.iterdir()) == []


def test_frames_are_saved_where_no_video_can_be(tmp_path: Path) -> None:
    """As the message about odd sides says; the run that made them may have taken hours."""
    request = VideoFlags(prompt="a", model="m", output=tmp_path / "a.mp4", frames=tmp_path)
    with pytest.raises(PlanError, match="save PNGs with --frames"):
        saved(request, np.zeros((2, 7, 8, 3), np.uint8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frame-0001.png", "frame-0002.png"]


def test_colours_and_order_survive(tmp_path: Path) -> None:
    colours = np.array([[200, 30, 30], [30, 200, 30], [30, 30, 200]], np.uint8)
    frames = np.broadcast_to(colours[:, None, None], (3, 64, 64, 3))
    save_video(frames, tmp_path / "a.mp4", 8)
    found = np.stack(decoded(tmp_path / "a.mp4")).mean((1, 2))
    assert np.abs(found - colours).max() < 8
