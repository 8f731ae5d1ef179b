"""The loop of one rank in a stream of images: it runs the pipeline for each image and computes its denoiser calls.

Every rank generates the whole first image, which shows the number of calls and the shapes of their outputs. Afterwards
rank r sends the results of all calls so far to rank r + 1, and begins the next image. Ranks take turns at the work
after the last call, mostly decoding, to balance the load.

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
from patchpar.stream.images.step_rotation import StepAssignment, shared_steps
from patchpar.stream.messages import EndStream, ImageRequest
from patchpar.stream.stage_link import OutgoingMessages

REST_SECONDS = 5.0
"""Seconds between heartbeats of a rank that waits for requests."""
LOOK_SECONDS = 0.002
"""Seconds between checks for the results of an image that this rank is to finish."""
Take = Callable[[float], ImageRequest | EndStream | None]


def calls_of(rank: int, ranks: int, calls: int) -> range:
    """Return a rank's denoiser calls, evenly, the fewer on earlier ranks. Raises PlanError for too many ranks."""
    if ranks > calls:
        raise PlanError(f"{ranks} ranks, but an image takes {calls} denoiser calls: use at most {calls} ranks")
    return range(rank * calls // ranks, (rank + 1) * calls // ranks)


def finisher_of(image: int, ranks: int, calls: int) -> int:
    """Return the rank that finishes the `image`-th image of a stream: in turn those with the fewest calls."""
    counts = [len(calls_of(rank, ranks, calls)) for rank in range(ranks)]
    least = [rank for rank, assignment in enumerate(counts) if assignment == min(counts)]
    return least[-1 - image % len(least)]


@dataclass(frozen=True, slots=True)
class ImageTail:
    """An image that this rank is to finish. `since`: when the receive was posted, by time.monotonic."""

    order: ImageRequest
    results: Work[Messages]
    since: float


class ImageStage:
    """Runs the pipeline on rank `stage_rank` of `ranks`; one rank has no `comm`. `beat`: see StepAssignment."""

    def __init__(
        self, pipe: Any, stage_rank: int, ranks: int, comm: Communicator | None, beat: Callable[[str], object]
    ) -> None:
        self._pipe, self._stage_rank, self._ranks, self._comm, self._beat = pipe, stage_rank, ranks, comm, beat
        self._tails: deque[ImageTail] = deque()
        self._leaving = OutgoingMessages()

    def run(self, take: Take, put: Callable[[int, Any], object]) -> int:
        """Run this rank's part of all requests until `take` returns EndStream; returns the number of requests.

        `take(seconds)` waits at most so long, and then returns None. `put(number, result)` is called for images that
        this rank finishes. Raises ExchangeError if another rank is late or has died, and the errors of the pipeline.
        """
        generated = 0
        with shared_steps(self._pipe, self._beat) as assignment:
            order: ImageRequest | EndStream | None = None
            while not isinstance(order, EndStream):
                if self._tails and self._is_due(self._tails[0]):
                    self._end(assignment, put)
                    continue
                order = take(LOOK_SECONDS if self._tails else REST_SECONDS)
                if isinstance(order, ImageRequest):
                    self._generate(assignment, order, generated, put)
                    generated += 1
            while self._tails:
                self._end(assignment, put)
        self._leaving.settle()
        return generated

    def _generate(
        self, assignment: StepAssignment, order: ImageRequest, image: int, put: Callable[[int, Any], object]
    ) -> None:
        is_last = self._stage_rank == self._ranks - 1
        if not assignment.calls:
            result = assignment.record(self._plain(order))
            calls_of(self._stage_rank, self._ranks, assignment.calls)
        else:
            result = self._run_own_steps(assignment, order, finisher_of(image, self._ranks, assignment.calls))
        if is_last and result is not None:
            put(order.number, result)

    def _run_own_steps(self, assignment: StepAssignment, order: ImageRequest, finisher: int) -> Any:
        """Run this rank's calls of an image; the result if it ends with them, None if another rank continues."""
        stage_rank, last = self._stage_rank, self._ranks - 1
        own = calls_of(stage_rank, self._ranks, assignment.calls)
        before = self._before(assignment, own)
        result = assignment.run(self._plain(order), own, before, ends=stage_rank == last == finisher)
        if result is None:
            self._send(finisher if stage_rank == last else stage_rank + 1, [*before, *assignment.made])
            if stage_rank == finisher:
                self._tails.append(self._tail(assignment, order))
        return result

    def _plain(self, order: ImageRequest) -> Callable[[], Any]:
        """The plain pipeline call of a request."""
        return lambda: self._pipe(**order.arguments, generator=torch.Generator().manual_seed(order.seed))

    def _before(self, assignment: StepAssignment, own: range) -> list[Tensor]:
        """Receive the results of all earlier calls."""
        if not own.start or self._comm is None:
            return []
        return self._comm.receive("steps", "stream", self._stage_rank - 1, assignment.specs(range(own.start))).wait_for(
            0
        )

    def _send(self, stage_rank: int, results: list[Tensor]) -> None:
        assert self._comm is not None
        self._leaving.add(self._comm.send("steps", "stream", [stage_rank], results))

    def _tail(self, assignment: StepAssignment, order: ImageRequest) -> ImageTail:
        """Post the receive of an image's results from the last rank, now, so that messages keep their order."""
        assert self._comm is not None
        results = self._comm.receive("steps", "stream", self._ranks - 1, assignment.specs(range(assignment.calls)))
        return ImageTail(order, results, time.monotonic())

    def _is_due(self, tail: ImageTail) -> bool:
        """Whether the results have arrived, or are so late that waiting for them raises ExchangeError."""
        assert self._comm is not None
        return tail.results.is_here(0) or time.monotonic() - tail.since > self._comm.transport.deadline

    def _end(self, assignment: StepAssignment, put: Callable[[int, Any], object]) -> None:
        """Finish the oldest pending image: run the pipeline with the received results of all calls, and decode."""
        tail = self._tails.popleft()
        nothing = range(assignment.calls, assignment.calls)
        put(tail.order.number, assignment.run(self._plain(tail.order), nothing, tail.results.wait_for(0), ends=True))
