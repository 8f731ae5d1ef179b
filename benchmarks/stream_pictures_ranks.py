"""What one rank does in benchmarks.stream_pictures: its steps of pictures that follow one another, timed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from patchpar.exchange import Door
from patchpar.stream.picture_engine import PictureEngine
from patchpar.stream.picture_stage import PictureStage
from patchpar.stream.picture_talk import PictureOrder

PROMPT = "a red house on the left and a pine on the right, green hills at sunset"
WARM = 2
"""Pictures of a stream that do not count: the first is drawn whole on every rank, the second fills the stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is streamed. `size`: pixels of both sides. `pictures`: of which the first ones do not count."""

    model: str
    size: int
    steps: int
    guidance: float
    pictures: int

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
    """When pictures came out, by time.time, and what they were."""

    times: tuple[float, ...]
    pictures: tuple[Any, ...]

    @property
    def gap(self) -> float:
        """Seconds from picture to picture, the median."""
        return statistics.median(b - a for a, b in pairwise(self.times[WARM - 1 :]))


class Bench(PictureEngine):
    """The engine of one rank, which takes its orders from a list."""

    def stream(self, case: Case, ranks: int) -> Streamed | None:
        """Draw on the first `ranks` ranks, others rest; what came out of the last one."""
        context = self._context
        if context.rank >= ranks:
            return None
        torch.set_num_threads(1)
        door = None if ranks == 1 else Door(self._transport, context.mark)
        orders = iter([PictureOrder(number=n, arguments=case.arguments(), seed=n) for n in range(case.pictures)])
        times, pictures = list[float](), list[Any]()

        def put(number: int, result: Any) -> None:
            times.append(time.time())
            pictures.append(np.asarray(result.images[0]))

        PictureStage(self._pipe, context.rank, ranks, door, context.mark).run(lambda: next(orders, None), put)
        return Streamed(times=tuple(times), pictures=tuple(pictures))
