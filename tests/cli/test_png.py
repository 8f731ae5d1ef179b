"""PNG by bands: any reader finds the picture, in hardly more bytes than one stream would take."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchpar.cli.pictures import LARGE, save
from patchpar.cli.png import BAND, SIGNATURE, write_png


def smooth(height: int, width: int, *, noise: int = 8) -> Image.Image:
    """A gradient with some noise, as pictures have."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([128 + 90 * np.sin(x / 40), 128 + 90 * np.cos(y / 60), (x + y) % 256], axis=-1)
    return Image.fromarray((waves + np.random.default_rng(0).integers(0, noise, waves.shape)).clip(0, 255).astype("u1"))


@pytest.mark.parametrize("height", [1, BAND - 1, BAND, BAND + 1, 3 * BAND])
@pytest.mark.parametrize("cores", [1, 3])
def test_any_reader_finds_the_picture(height: int, cores: int) -> None:
    picture, stream = smooth(height, 70), io.BytesIO()
    write_png(picture, stream, cores=cores)
    found = Image.open(io.BytesIO(stream.getvalue()))
    found.verify()  # checksums of all chunks
    assert np.array_equal(np.asarray(Image.open(stream)), np.asarray(picture))


def test_bands_cost_little() -> None:
    """Against the same bytes in one band."""
    picture, stream = smooth(8 * BAND, 256), io.BytesIO()
    write_png(picture, stream, cores=2)
    alone = io.BytesIO()
    picture.save(alone, "PNG")
    assert len(stream.getvalue()) < 1.15 * len(alone.getvalue())


def test_large_pictures_are_saved_so(tmp_path: Path) -> None:
    picture = smooth(1024 + BAND, LARGE // 1024)
    for name, chunks in (("a.png", 1 + 5 + 1), ("a.PNG", 1 + 5 + 1)):
        save(picture, tmp_path / name)
        assert np.array_equal(np.asarray(Image.open(tmp_path / name)), np.asarray(picture))
        assert count_of(tmp_path / name, b"IDAT") == chunks
    save(smooth(64, 64), tmp_path / "small.png")
    assert count_of(tmp_path / "small.png", b"IDAT") == 1


def count_of(path: Path, kind: bytes) -> int:
    data, place, count = path.read_bytes(), len(SIGNATURE), 0
    while place < len(data):
        length, found = struct.unpack_from(">I4s", data, place)
        count, place = count + (found == kind), place + length + 12
    return count
