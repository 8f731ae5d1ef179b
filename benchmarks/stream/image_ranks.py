"""What one rank does in benchmarks.stream.images: whole images, in turn with the other ranks, timed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from patchpar.stream.images.runner import ImageRunner
from patchpar.stream.messages import ImageRequest

PROMPT = "a red house on the left and a pine on the right, green hills at sunset"
WARM = 2
"""Images at the beginning and at the end of a stream that do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is streamed. `size`: pixels of both sides. `images`: of which the first and last do not count."""

    model: str
    size: int
    steps: int
    guidance: float
    images: int

    def arguments(self) -> dict[str, Any]:
        """For the pipeline."""
        return {
            "prompt": PROMPT,
            "height": self.size,
            "width": self.size,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """When images came out, by time.time, and what they were, in the order of their numbers."""

    times: tuple[float, ...]
    images: tuple[Any, ...]

    @property
    def gap(self) -> float:
        """Seconds from image to image, the mean over those that count: ranks that take turns make pairs."""
        counted = self.times[WARM - 1 : -WARM]
        return (counted[-1] - counted[0]) / (len(counted) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An image that ended on a rank, at a moment of time.time."""

    number: int
    moment: float
    image: Any


def in_order(ended: Iterable[Ended]) -> Streamed:
    """What all ranks ended, as one stream: an image comes out when those before it have."""
    times, images = list[float](), list[Any]()
    for one in sorted(ended, key=lambda one: one.number):
        times.append(max([one.moment, *times[-1:]]))
        images.append(one.image)
    return Streamed(times=tuple(times), images=tuple(images))


class Bench(ImageRunner):
    """The engine of one rank, which takes its orders from a list."""

    def stream(self, case: Case, ranks: int) -> list[Ended]:
        """Generate on the first `ranks` ranks, others rest; what ended here."""
        rank = self._context.rank
        if rank >= ranks:
            return []
        torch.set_num_threads(1)
        ended = list[Ended]()
        for number in range(rank, case.images, ranks):
            image = self._generated(ImageRequest(number=number, arguments=case.arguments(), seed=number))
            ended.append(Ended(number=number, moment=time.time(), image=np.asarray(image)))
            self._context.beat("image")
        return ended
