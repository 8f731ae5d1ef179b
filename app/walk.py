"""Noise that changes a little from picture to picture, so that a prompt alone becomes a film.

noise(t) = cos(a) first + sin(a) second        a circle: as white as its two ends everywhere, and closed
"""

import math
from typing import Any

PICTURES_PER_ROUND = 96


class NoiseWalk:
    """Latents (1, channels, height, width) for picture after picture. The same seed, the same walk."""

    def __init__(self, seed: int, shape: tuple[int, int, int]) -> None:
        import torch

        generator = torch.Generator("cpu").manual_seed(seed)
        self._first, self._second = (torch.randn((1, *shape), generator=generator) for _ in range(2))

    def at(self, number: int) -> Any:
        """The noise of a picture."""
        angle = 2 * math.pi * number / PICTURES_PER_ROUND
        return math.cos(angle) * self._first + math.sin(angle) * self._second
