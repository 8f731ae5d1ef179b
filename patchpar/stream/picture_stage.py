"""One rank's part in a stream of pictures: each runs through the plain pipeline, and our denoiser calls are ours.

The first picture is drawn whole on every rank, which tells how many calls there are and what they return. From then on
rank r hands the results of all calls so far to rank r + 1, and begins the next picture.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.exchange import Arriving, Door
from patchpar.stream.link import HELD
from patchpar.stream.picture_talk import PictureOrder
from patchpar.stream.step_share import StepShare, shared_steps


def calls_of(rank: int, ranks: int, calls: int) -> range:
    """The denoiser calls of one rank: whole steps where they divide evenly, the earlier ranks the fewer.

    Raises PlanError if there are more ranks than calls.
    """
    if ranks > calls:
        raise PlanError(f"{ranks} ranks, but a picture takes {calls} denoiser calls: use at most {calls} ranks")
    return range(rank * calls // ranks, (rank + 1) * calls // ranks)


class PictureStage:
    """What a rank does with its pipeline. `place` of `ranks`; `door` is None where there is one rank only.

    `mark`: see StepShare.
    """

    def __init__(self, pipe: Any, place: int, ranks: int, door: Door | None, mark: Callable[[str], object]) -> None:
        self._pipe, self._place, self._ranks, self._door, self._mark = pipe, place, ranks, door, mark
        self._before: list[Tensor] = []
        self._held: deque[Arriving] = deque()

    def run(self, take: Callable[[], PictureOrder | None], put: Callable[[int, Any], object]) -> int:
        """Draw all that `take` orders, until it gives None; finished ones go to `put` on the last rank. How many.

        Raises ExchangeError if another rank is late or gone, and what the pipeline raises.
        """
        drawn = 0
        with shared_steps(self._pipe, self._mark) as share:
            while (order := take()) is not None:
                result = self._draw(share, order)
                drawn += 1
                if self._place == self._ranks - 1:
                    put(order.number, result)
        while self._held:
            self._held.popleft().wait()
        return drawn

    def _draw(self, share: StepShare, order: PictureOrder) -> Any:
        def plain() -> Any:
            generator = torch.Generator().manual_seed(order.seed)
            return self._pipe(**order.arguments, generator=generator)

        if not share.calls:
            result = share.record(plain)
            calls_of(self._place, self._ranks, share.calls)
            return result
        own = calls_of(self._place, self._ranks, share.calls)
        result = share.run(plain, own, self._receive(share, own))
        if own.stop < share.calls:
            self._send(share.made)
        return result

    def _receive(self, share: StepShare, own: range) -> list[Tensor]:
        """All results before ours. They are kept, to be handed on."""
        self._before = []
        if own.start and self._door is not None:
            specs = share.specs(range(own.start))
            self._before = self._door.receive("steps", "stream", self._place - 1, specs).wait_for(0)
        return self._before

    def _send(self, made: list[Tensor]) -> None:
        assert self._door is not None
        self._held.append(self._door.send("steps", "stream", [self._place + 1], [*self._before, *made]))
        while len(self._held) > HELD:
            self._held.popleft().wait()
