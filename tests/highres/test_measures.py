"""Measures see what is planted, and see nothing where nothing is."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.highres import __main__ as highres
from benchmarks.highres.__main__ import ImageSet, asked
from benchmarks.highres.counting import accuracy, miscounted, objects, subjects
from benchmarks.highres.generation import ImageCache
from benchmarks.highres.measures import agreement_db, repetition_index, seam_index
from training.latents import to_tensor
from training.render import render

EXCHANGE_POINTS = (128, 256, 384)


def field(side: int, slope: float, seed: int = 0) -> Tensor:
    """An image whose power falls with frequency."""
    along = torch.fft.fftfreq(side)
    power = torch.sqrt(along[:, None] ** 2 + along**2).clamp_min(1 / side) ** (-slope / 2)
    white = torch.randn(3, side, side, generator=torch.Generator().manual_seed(seed))
    found = torch.fft.ifft2(torch.fft.fft2(white) * power).real
    return 0.5 + 0.2 * found / found.std()


def test_a_step_of_two_grey_levels_is_a_seam() -> None:
    image = field(512, 3.0)
    assert abs(seam_index(image, EXCHANGE_POINTS).z) < 2
    for number, row in enumerate(EXCHANGE_POINTS):
        image[:, row:] += 2 / 255 * (-1) ** number
    assert seam_index(image, EXCHANGE_POINTS).z > 4
    assert abs(seam_index(image, (100, 200, 300)).z) < 2


def test_a_planted_copy_is_repetition() -> None:
    tile, detail = field(128, 2.5, seed=1), field(512, 1.0, seed=2) * 0.15
    large = F.interpolate(tile[None], scale_factor=4, mode="bicubic")[0]
    clean = repetition_index(large + detail, (128, 128)).value
    assert abs(clean) < 0.05
    assert repetition_index(tile.repeat(1, 4, 4) + detail, (128, 128)).value > 0.8
    assert repetition_index(0.7 * large + 0.3 * tile.repeat(1, 4, 4) + detail, (128, 128)).value > clean + 0.1
    assert agreement_db(large + detail - 0.075, tile) > 30
    assert agreement_db(field(512, 2.5, seed=3), tile) < 20


@pytest.mark.parametrize("side", [128, 256])
def test_rendered_objects_are_counted(side: int) -> None:
    assert accuracy(40, side=side) >= 0.9


def test_a_second_object_is_counted() -> None:
    subject = next(each for each in subjects(20) if len(each.colors) == 1)
    displayed = (to_tensor(render(subject.scene, random.Random(0), height=128, width=128).pixels)[0] + 1) / 2
    assert miscounted(displayed, subject) == 0
    tiled = displayed.repeat(1, 2, 2)
    assert objects(F.interpolate(tiled[None], (256, 256))[0], subject.colors[0]) == 4
    assert miscounted(F.interpolate(tiled[None], (256, 256))[0], subject) == 3


def test_which_images_are_asked_for() -> None:
    """Native ones are drawn beside any, in the order of the table; what is none is told."""
    assert asked("2x4x16") == ImageSet()
    assert asked("4x1x8:flow+calibrated, not kept") == ImageSet(
        scale=4, captions=1, steps=8, methods=("native", "calibrated, not kept", "flow")
    )
    with pytest.raises(argparse.ArgumentTypeError, match="'2x4' is no SCALExCAPTIONSxSTEPS"):
        asked("2x4")
    with pytest.raises(argparse.ArgumentTypeError, match="no method 'mine': there are native"):
        asked("2x4x8:mine")


def test_images_that_are_kept_are_those_of_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used: list[ImageCache] = []
    monkeypatch.setattr(highres, "accuracy", lambda _: 1.0)
    monkeypatch.setattr(highres, "images", lambda methods, captions, kept, sheet: used.append(kept) or iter(["row"]))
    monkeypatch.setattr(sys, "argv", ["highres", "--only", "images", "--kept", str(tmp_path)])
    assert "row" in list(highres._images(highres.parse()))
    assert used == [ImageCache(scale=2, steps=16, folder=tmp_path)]
