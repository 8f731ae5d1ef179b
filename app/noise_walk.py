"""Noise that changes a little from image to image, which turns a single prompt into a video.

noise(t) = cos(a) first + sin(a) second        a circle: as white as its two ends everywhere, and closed
"""

import math
from typing import Any

PERIOD = 96


class NoiseWalk:
    """Initial latents (1, channels, height, width) of successive images. The same seed gives the same walk."""

    def __init__(self, seed: int, shape: tuple[int, int, int]) -> None:
        import torch

        generator = torch.Generator("cpu").manual_seed(seed)
        self._first, self._second = (torch.randn((1, *shape), generator=generator) for _ in range(2))

    def at(self, number: int) -> Any:
        """The noise of image `number`, shape (1, channels, height, width)."""
        angle = 2 * math.pi * number / PERIOD
        return math.cos(angle) * self._first + math.sin(angle) * self._second
