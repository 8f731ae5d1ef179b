"""Images that pipelines take as input: smooth gradients with an edge, drawn by arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image


def scene(height: int = 128, width: int = 128) -> Any:
    y, x = np.mgrid[0:height, 0:width]
    red = 255 * y / height
    green = 255 * x / width
    blue = np.where(x > y, 200, 40)
    return Image.fromarray(np.stack([red, green, blue], axis=-1).astype(np.uint8))


def mask(height: int = 128, width: int = 128) -> Any:
    """White, to be painted again, in the lower right quarter."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray((255 * ((y > height // 2) & (x > width // 3))).astype(np.uint8))


def video(frames: int = 9, size: int = 64) -> list[Any]:
    """One image that is turned a little further in every frame."""
    return [scene(size, size).rotate(4 * number) for number in range(frames)]
