"""Maps of errors: one scale for all, every strategy, and the page that shows the files that are there."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from benchmarks.error_maps.__main__ import PLANS, Compared, save, section
from benchmarks.error_maps.colours import ANCHORS, coloured, errors_of, scale_svg
from patchpar import Plan
from patchpar.strategies import known


def test_equal_images_are_black_and_larger_errors_are_brighter() -> None:
    image = np.full((8, 8, 3), 0.5)
    assert not coloured(errors_of(image, image)).any()
    other = image.copy()
    other[2:4, :, 1] += 1e-3
    other[6:, :, 2] -= 0.4
    errors = errors_of(image, other)
    assert np.allclose(errors[[0, 2, 7], 0], [0, 1e-3, 0.4])
    brightness = coloured(np.logspace(-5, 0.5, 60)).astype(int).sum(axis=-1)
    assert (np.diff(brightness) >= 0).all()
    assert (tuple(coloured(np.float64(0))), tuple(coloured(np.float64(1)))) == (ANCHORS[0], ANCHORS[-1])


def test_the_scale_is_that_of_the_colours() -> None:
    svg = ElementTree.fromstring(scale_svg())
    assert [each.text for each in svg.iter() if each.tag.endswith("text")] == ["1e-4", "1e-3", "1e-2", "1e-1", "1e0"]


def test_every_strategy_that_generates_the_same_image_has_a_map() -> None:
    plans = [Plan.parse(text) for texts in PLANS.values() for text in texts]
    assert {plan.strategy.name for plan in plans} == set(known()) - {"structure"}


def test_the_page_shows_the_maps(tmp_path: Path) -> None:
    errors = np.zeros((16, 16))
    errors[:4] = 0.1
    row = Compared(plan="patch=4,strategy=displaced:preset=paper,warmup_steps=1", errors=errors, psnr_db=30.25)
    save(tmp_path, np.zeros((16, 16, 3)), [row])
    assert Image.open(tmp_path / row.file).size == (16, 16)
    assert (tmp_path / "one-process.png").is_file()
    *_, line, _ = section("embedded", [row], "maps")
    text = "displaced:preset=paper,warmup_steps=1"
    image = f"![Errors of {text} (DistriFusion)](maps/displaced-preset-paper-warmup-steps-1.png)"
    assert line == f"| `{text}` (DistriFusion) | 4 | {image} | 30.2 | 1.0e-01 | 25.0 % |"
