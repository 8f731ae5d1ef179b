"""Sides that a format of images can have: beyond them an image would be made, and not be encoded."""

from __future__ import annotations

import pytest
from PIL import Image

from patchpar.serving.image_encoding import MOST_SIDE, image_bytes


@pytest.mark.parametrize("output_format", sorted(MOST_SIDE))
def test_the_longest_side_of_a_format(output_format: str) -> None:
    side = MOST_SIDE[output_format]  # type: ignore[index]
    assert image_bytes(Image.new("RGB", (side, 1)), output_format, None)  # type: ignore[arg-type]
    with pytest.raises((ValueError, OSError)):
        image_bytes(Image.new("RGB", (side + 1, 1)), output_format, None)  # type: ignore[arg-type]
