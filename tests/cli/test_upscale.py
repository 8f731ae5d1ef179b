"""`patchpar upscale`: when it saves, and what it says where there is nothing to save."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import patchpar
from patchpar.errors import PlanError
from patchpar.media.image_file import MAX_SCALE


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.png"
    Image.new("RGB", (8, 8)).save(path)
    return path


def test_saves_while_the_workers_stop(
    fake: Any, run: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `generate` does: the file is there before the workers are gone."""
    target, found = tmp_path / "large.png", list[bool]()

    def upscale(pipe: Any, image: Image.Image, **options: Any) -> Image.Image:
        pipe("a house", num_images_per_prompt=1)
        return image.resize((16, 12))

    def stop(self: Any, *_: object) -> None:
        deadline = time.monotonic() + 30
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(target.exists())

    monkeypatch.setattr(patchpar, "upscale", upscale, raising=False)
    monkeypatch.setattr(fake, "__exit__", stop)
    result = run("upscale", small, "--output", target)
    assert result.exit_code == 0, result.output
    assert found == [True]
    assert f"saved {target}: 16 x 12 pixels" in result.stdout


def test_a_rank_without_a_result_saves_nothing(
    fake: Any, run: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun all ranks but the first."""
    monkeypatch.setattr(patchpar, "upscale", lambda *_, **__: None, raising=False)
    result = run("upscale", small, "--output", tmp_path / "large.png")
    assert result.exit_code == 0, result.output
    assert (result.stdout, (tmp_path / "large.png").exists()) == ("", False)


def test_an_image_that_would_be_too_large_is_refused_before_a_model_is_loaded(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, and by the function before it takes memory."""
    path = tmp_path / "wide.png"
    Image.new("L", (6250, 6250)).save(path)
    result = run("upscale", path, "--scale", 16, "--model", "none", "--output", tmp_path / "large.png")
    assert result.exit_code == 2
    assert "at --scale 16 has 100000 x 100000 pixels: at most 80 million are taken" in " ".join(result.stderr.split())
    monkeypatch.setattr(Image.Image, "resize", lambda *_, **__: pytest.fail("it was resized"))
    pipe: Any = SimpleNamespace(description=SimpleNamespace(parameters=("image", "strength"), pipeline="P"))
    with Image.open(path) as image, pytest.raises(PlanError, match="scale=16 has 100000 x 100000 pixels"):
        patchpar.upscale(pipe, image, scale=16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scale", 1), "--scale 1: it must be above 1 and at most 16"),
        (("--scale", 16.5), "--scale 16.5: it must be above 1 and at most 16"),
        (("--scale", "nan"), "--scale nan: it must be above 1"),
        (("--strength", 0), "--strength 0: it must be above 0, which adds no noise, and below 1"),
        (("--strength", 1), "--strength 1: it must be above 0"),
    ],
)
def test_an_amount_that_cannot_be_is_refused_before_workers_start(
    fake: Any, run: Any, small: Path, flags: tuple[Any, ...], message: str
) -> None:
    result = run("upscale", small, *flags)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output
    assert fake.opened == []


def test_the_limits_of_flags_are_those_of_the_function() -> None:
    unused: Any = None
    for scale, strength in ((1.0, 0.5), (MAX_SCALE + 0.5, 0.5), (2.0, 0.0), (2.0, 1.0)):
        with pytest.raises(PlanError, match="it must be above"):
            patchpar.upscale(unused, Image.new("RGB", (8, 8)), scale=scale, strength=strength)
    with pytest.raises(AttributeError):
        patchpar.upscale(unused, Image.new("RGB", (8, 8)), scale=MAX_SCALE, strength=0.5)
