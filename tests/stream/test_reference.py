"""A reference from whatever a caller has; what is no image is refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchpar.errors import PlanError
from patchpar.stream.video_source import load_reference_image
from tests.media.test_image_file import huge_png
from tests.tensors import elsewhere

RED_ABOVE = np.zeros((8, 12, 3), np.uint8)
RED_ABOVE[:4, :, 0] = 200


@pytest.mark.parametrize("kind", ["file", "text", "PIL", "array", "tensor", "another device", "read-only array"])
def test_every_kind_is_the_same_image(kind: str, tmp_path: Path) -> None:
    Image.fromarray(RED_ABOVE).save(tmp_path / "a.png")
    locked = RED_ABOVE.copy()
    locked.flags.writeable = False
    given: Any = {
        "file": tmp_path / "a.png",
        "text": str(tmp_path / "a.png"),
        "PIL": Image.fromarray(RED_ABOVE),
        "array": RED_ABOVE,
        "tensor": torch.from_numpy(RED_ABOVE),
        "another device": elsewhere(torch.from_numpy(RED_ABOVE)),
        "read-only array": locked,
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that it must not write to
        found = load_reference_image(given, 8, 12)
    assert type(found) is torch.Tensor
    assert torch.equal(found, torch.from_numpy(RED_ABOVE))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_modes_and_sizes_are_converted(mode: str) -> None:
    found = load_reference_image(Image.new("RGB", (100, 30), "teal").convert(mode), 8, 12)
    assert (found.shape, found.dtype) == ((8, 12, 3), torch.uint8)


def test_an_image_of_a_camera_held_upright_is_turned(tmp_path: Path) -> None:
    image = Image.fromarray(RED_ABOVE).rotate(90, expand=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    image.save(tmp_path / "a.png", exif=exif)
    assert torch.equal(load_reference_image(tmp_path / "a.png", 8, 12), torch.from_numpy(RED_ABOVE))


def test_an_image_that_would_take_gigabytes_is_not_decoded(tmp_path: Path) -> None:
    path = huge_png(tmp_path / "huge.png", 20_000)
    with pytest.raises(PlanError, match=r"huge.png has too many pixels: at most 80 million are taken"):
        load_reference_image(path, 8, 12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("none.png", "none.png cannot be read as an image"),
        (__file__, "test_reference.py cannot be read as an image"),
        (object(), "a reference of object is no image: give a file"),
        (np.array(["a"]), "a reference of ndarray is no image"),
        (np.zeros((8, 12, 3)), r"shape \(8, 12, 3\) in torch.float64"),
        (np.zeros((4, 4, 3), np.uint8), r"or \(8, 12, 3\) in uint8"),
    ],
)
def test_what_is_no_image(given: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_reference_image(given, 8, 12)
