"""Images on disk: the same pixels, whatever the size, and large ones compressed less."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchpar.cli.output_files import LARGE, save


def smooth(height: int, width: int) -> Image.Image:
    """A gradient with some noise, as images have."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([128 + 90 * np.sin(x / 40), 128 + 90 * np.cos(y / 60), (x + y) % 256], axis=-1)
    return Image.fromarray((waves + np.random.default_rng(0).integers(0, 8, waves.shape)).clip(0, 255).astype("u1"))


def bytes_of(image: Image.Image, **options: int) -> int:
    stream = io.BytesIO()
    image.save(stream, "PNG", **options)
    return len(stream.getvalue())


@pytest.mark.parametrize("name", ["a.png", "a.PNG"])
@pytest.mark.parametrize(("width", "options"), [(LARGE // 1024 + 1, {"compress_level": 1}), (64, {})])
def test_png(tmp_path: Path, name: str, width: int, options: dict[str, int]) -> None:
    image = smooth(1024, width)
    save(image, tmp_path / name)
    assert np.array_equal(np.asarray(Image.open(tmp_path / name)), np.asarray(image))
    assert (tmp_path / name).stat().st_size == bytes_of(image, **options)
