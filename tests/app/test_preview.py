"""Previews: colours of latents are learnt from one image, whatever the model."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from patchpar.serving.latent_preview import ColourMap


def scene(seed: int, channels: int = 4) -> tuple[np.ndarray, Image.Image]:
    """Latents, and the image that a linear decoder makes of them."""
    rng = np.random.default_rng(seed)
    latents = rng.normal(size=(channels, 16, 24))
    mixing = np.random.default_rng(0).normal(size=(3, channels)) * 0.15 / channels**0.5
    cells = np.clip(np.einsum("kc,chw->hwk", mixing, latents) + 0.5, 0, 1)
    return latents, Image.fromarray((cells * 255).round().astype(np.uint8)).resize((96, 64), Image.Resampling.NEAREST)


def error(displayed: Image.Image, image: Image.Image) -> float:
    small = [np.asarray(each.resize((24, 16), Image.Resampling.BOX), float) for each in (displayed, image)]
    return float(np.abs(small[0] - small[1]).mean())


@pytest.mark.parametrize("channels", [4, 16])
def test_it_shows_other_latents_after_one_image(channels: int) -> None:
    colours = ColourMap()
    colours.fit(*scene(1, channels))
    latents, image = scene(2, channels)
    displayed = colours.show(latents)
    assert displayed is not None
    assert displayed.size == (192, 128)
    assert error(displayed, image) < 12
    assert error(displayed, scene(3, channels)[1]) > 20  # of other latents


def test_without_an_image_of_the_kind_there_is_none() -> None:
    colours = ColourMap()
    assert colours.show(scene(1)[0]) is None
    colours.fit(*scene(1))
    assert colours.show(scene(1, 16)[0]) is None


def test_what_is_no_grid_is_left_alone() -> None:
    colours = ColourMap()
    latents, image = scene(1)
    colours.fit(latents.reshape(4, -1), image)
    colours.fit(latents * np.nan, image)
    assert colours.show(latents) is None
    colours.fit(latents, image)
    assert colours.show(latents * np.nan) is None
