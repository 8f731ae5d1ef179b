"""`patchpar upscale`: when it saves, and what it says where there is nothing to save."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import patchpar


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
