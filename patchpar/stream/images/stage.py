"""One rank's part in a stream of images: each runs through the plain pipeline, and our denoiser calls are ours.

The first image is generated whole on every rank, which shows how many calls there are and what they return. From then
on rank r sends the results of all calls so far to rank r + 1, and begins the next image. Ranks take turns at what is
left when all calls are done, which is mostly decoding, so that none of them has more to do than the others.

    rank 0    0 1 |   0 1 | image |   0 1 | ...      of images 1, 2, 1, 3
    rank 1            2 3 |     2 3 image | ...      of images 1, 2
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Messages, Work
from patchpar.errors import PlanError
from patchpar.stream.images.messages import ImageRequest
from patchpar.stream.images.step_rotation import StepAssignment, shared_steps
from patchpar.stream.messages import EndStream
from patchpar.stream.stage_link import OutgoingMessages

REST_SECONDS = 5.0
"""How often a rank that waits for orders shows that it is there."""
LOOK_SECONDS = 0.002
"""How often a rank without orders looks whether an image that it is to end has come."""
Take = Callable[[float], ImageRequest | EndStream | None]


def calls_of(rank: int, ranks: int, calls: int) -> range:
    """The denoiser calls of one rank: whole steps where they divide evenly, the earlier ranks the fewer.

    Raises PlanError if there are more ranks than calls.
    """
    if ranks > calls:
        raise PlanError(f"{ranks} ranks, but an image takes {calls} denoiser calls: use at most {calls} ranks")
    return range(rank * calls // ranks, (rank + 1) * calls // ranks)


def finisher_of(image: int, ranks: int, calls: int) -> int:
    """The rank that ends the `image`-th of a stream: in turn those that have the fewest calls."""
    shares = [len(calls_of(rank, ranks, calls)) for rank in range(ranks)]
    least = [rank for rank, share in enumerate(shares) if share == min(shares)]
    return least[-1 - image % len(least)]


@dataclass(frozen=True, slots=True)
class ImageTail:
    """An image that this rank is to end. `since`: when that was known, by time.monotonic."""

    order: ImageRequest
    results: Work[Messages]
    since: float


class ImageStage:
    """What a rank does with its pipeline. `place` of `ranks`; `communicator` is None where there is one rank only.

    `mark`: see StepAssignment.
    """

    def __init__(
        self, pipe: Any, place: int, ranks: int, communicator: Communicator | None, mark: Callable[[str], object]
    ) -> None:
        self._pipe, self._place, self._ranks, self._communicator, self._mark = pipe, place, ranks, communicator, mark
        self._tails: deque[ImageTail] = deque()
        self._leaving = OutgoingMessages()

    def run(self, take: Take, put: Callable[[int, Any], object]) -> int:
        """Generate our part of all that `take` orders, until it says EndStream; how many images were ordered.

        `take` is given the seconds that it may wait, and returns None if there is nothing by then. `put` gets the
        images that end here. Raises ExchangeError if another rank is late or gone, and what the pipeline raises.
        """
        generated = 0
        with shared_steps(self._pipe, self._mark) as share:
            heard: ImageRequest | EndStream | None = None
            while not isinstance(heard, EndStream):
                if self._tails and self._is_due(self._tails[0]):
                    self._end(share, put)
                    continue
                heard = take(LOOK_SECONDS if self._tails else REST_SECONDS)
                if isinstance(heard, ImageRequest):
                    self._draw(share, heard, generated, put)
                    generated += 1
            while self._tails:
                self._end(share, put)
        self._leaving.settle()
        return generated

    def _draw(self, share: StepAssignment, order: ImageRequest, image: int, put: Callable[[int, Any], object]) -> None:
        is_last = self._place == self._ranks - 1
        if not share.calls:
            result = share.record(self._plain(order))
            calls_of(self._place, self._ranks, share.calls)
        else:
            result = self._share(share, order, finisher_of(image, self._ranks, share.calls))
        if is_last and result is not None:
            put(order.number, result)

    def _share(self, share: StepAssignment, order: ImageRequest, finisher: int) -> Any:
        """Our calls of an image; the image if it ends with them, None if they were handed on."""
        place, last = self._place, self._ranks - 1
        own = calls_of(place, self._ranks, share.calls)
        before = self._before(share, own)
        result = share.run(self._plain(order), own, before, ends=place == last == finisher)
        if result is None:
            self._send(finisher if place == last else place + 1, [*before, *share.made])
            if place == finisher:
                self._tails.append(self._tail(share, order))
        return result

    def _plain(self, order: ImageRequest) -> Callable[[], Any]:
        """What the pipeline does without us."""
        return lambda: self._pipe(**order.arguments, generator=torch.Generator().manual_seed(order.seed))

    def _before(self, share: StepAssignment, own: range) -> list[Tensor]:
        """All results before ours. They are kept, to be handed on."""
        if not own.start or self._communicator is None:
            return []
        return self._communicator.receive("steps", "stream", self._place - 1, share.specs(range(own.start))).wait_for(0)

    def _send(self, place: int, results: list[Tensor]) -> None:
        assert self._communicator is not None
        self._leaving.add(self._communicator.send("steps", "stream", [place], results))

    def _tail(self, share: StepAssignment, order: ImageRequest) -> ImageTail:
        """An image that comes back from the last rank. Expected now, so that messages keep their order."""
        assert self._communicator is not None
        results = self._communicator.receive("steps", "stream", self._ranks - 1, share.specs(range(share.calls)))
        return ImageTail(order, results, time.monotonic())

    def _is_due(self, tail: ImageTail) -> bool:
        """Whether it is here, or so late that it is to be waited for, which says so if it does not come."""
        assert self._communicator is not None
        return tail.results.is_here(0) or time.monotonic() - tail.since > self._communicator.transport.deadline

    def _end(self, share: StepAssignment, put: Callable[[int, Any], object]) -> None:
        """Run through the oldest image that we are to end, all calls of which are given, and decode it."""
        tail = self._tails.popleft()
        nothing = range(share.calls, share.calls)
        put(tail.order.number, share.run(self._plain(tail.order), nothing, tail.results.wait_for(0), ends=True))
