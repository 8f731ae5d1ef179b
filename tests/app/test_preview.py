"""Previews: colours of latents are learnt from one picture, whatever the model."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from app.preview import ColourMap


def scene(seed: int, channels: int = 4) -> tuple[np.ndarray, Image.Image]:
    """Latents, and the picture that a linear decoder makes of them."""
    rng = np.random.default_rng(seed)
    latents = rng.normal(size=(channels, 16, 24))
    mixing = np.random.default_rng(0).normal(size=(3, channels)) * 0.15 / channels**0.5
    cells = np.clip(np.einsum("kc,chw->hwk", mixing, latents) + 0.5, 0, 1)
    return latents, Image.fromarray((cells * 255).round().astype(np.uint8)).resize((96, 64), Image.Resampling.NEAREST)


def error(shown: Image.Image, picture: Image.Image) -> float:
    small = [np.asarray(each.resize((24, 16), Image.Resampling.BOX), float) for each in (shown, picture)]
    return float(np.abs(small[0] - small[1]).mean())


@pytest.mark.parametrize("channels", [4, 16])
def test_it_shows_other_latents_after_one_picture(channels: int) -> None:
    colours = ColourMap()
    colours.learn(*scene(1, channels))
    latents, picture = scene(2, channels)
    shown = colours.show(latents)
    assert shown is not None
    assert shown.size == (384, 256)
    assert error(shown, picture) < 12
    assert error(shown, scene(3, channels)[1]) > 20  # of other latents


def test_without_a_picture_of_the_kind_there_is_none() -> None:
    colours = ColourMap()
    assert colours.show(scene(1)[0]) is None
    colours.learn(*scene(1))
    assert colours.show(scene(1, 16)[0]) is None


def test_what_is_no_grid_is_left_alone() -> None:
    colours = ColourMap()
    latents, picture = scene(1)
    colours.learn(latents.reshape(4, -1), picture)
    colours.learn(latents * np.nan, picture)
    assert colours.show(latents) is None
    colours.learn(latents, picture)
    assert colours.show(latents * np.nan) is None
