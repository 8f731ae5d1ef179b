"""`ImageSession`: sends each request to one rank, and delivers images in the order of their pushes.

push ---> [ waiting requests ] ---> the rank with the least to do, as soon as there is credit
deliver  <--- [ reordering ] <--- ranks

Each rank runs in a call of its own. If one dies, its requests go to others, or to it when it has been started anew.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Literal, get_args

from patchpar.errors import LaunchError, PlanError
from patchpar.launch.executor import SendToRank
from patchpar.plan.scalars import is_whole, make_plain
from patchpar.stream.base_session import LOST, BaseSession
from patchpar.stream.delivery import Output, check_output
from patchpar.stream.messages import EndStream, GeneratedImage, ImageRequest

Intake = Literal["all", "latest"]
PUSH_SECONDS = 60.0
QUEUED = 2
"""Requests at a rank: one that it works on, and the next."""
PATIENCE = 2
"""Deaths of a rank without an image between them, after which it is left out."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageResult:
    """An image as the pipeline returned it. `number`: that of its push. `latency`: seconds since that push."""

    number: int
    image: Any
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStreamOptions:
    """Options of an image stream. Raises PlanError.

    `intake`: with "all" a push waits for room, with "latest" a newer frame replaces one that waits. `output`: for a
    slow consumer, "block" waits; "drop_oldest" and "skip_to_live" drop images. `lead`: images that may be ready beyond
    one in flight on each rank. `seed`: of every image. `restarts`: how often within a minute a rank that has died is
    started anew.
    """

    ranks: int
    seed: int
    intake: Intake = "all"
    output: Output = "block"
    lead: int = 2
    restarts: int = 3

    def __post_init__(self) -> None:
        make_plain(self)
        check_output(self.output, self.lead, self.restarts)
        if self.intake not in get_args(Intake):
            raise PlanError(f"intake={self.intake!r}: use one of {', '.join(get_args(Intake))}")
        if not is_whole(self.seed, 0, 2**63 - 1):
            raise PlanError(f"seed={self.seed!r}: it must be a whole number of at least 0 and below 2**63")


class ImageSession(BaseSession[ImageResult, int]):
    """One stream of images. A context manager and an iterator, plain and async. Controls return an image's number.

    `run(rank, on_event=, on_start=)` runs a rank. `arguments`: of the pipeline, for every image.
    """

    def __init__(self, run: Callable[..., Any], options: ImageStreamOptions, arguments: Mapping[str, Any]) -> None:
        super().__init__(options.ranks + options.lead, options.output, options.lead, options.restarts)
        self._run, self._options, self._arguments = run, options, dict(arguments)
        self._waiting: deque[ImageRequest] = deque()
        self._pushed: dict[int, float] = {}  # when, by number in the order of delivery
        self._generated: dict[int, Any] = {}  # images that wait for an earlier one
        self._sends: dict[int, Callable[[Any], None]] = {}  # of the ranks that take requests
        self._todo: dict[int, dict[int, ImageRequest]] = {rank: {} for rank in range(options.ranks)}
        self._left_over: deque[ImageRequest] = deque()  # of ranks that have died
        self._deaths: dict[int, int] = dict.fromkeys(range(options.ranks), 0)  # since their last image
        self._failure: Exception | None = None
        self._latest = -1  # rank of the last request
        self._number = 0  # of the next push
        self._thread.start()

    # --- controls ---------------------------------------------------------------------------------------------------

    def push(self, **arguments: Any) -> int:
        """Request one more image, with these pipeline arguments in addition to those of the stream. Returns its number.

        With intake "latest" it replaces those that wait. Raises PlanError if the stream has ended, or no image is taken
        for a minute.
        """
        with self._changed:
            self._wait_for_room()
            self._check_running()
            for request in self._waiting:  # none where the intake is "all"
                del self._pushed[request.number]
                self.dropped += 1
            self._waiting.clear()
            number, self._number = self._number, self._number + 1
            self._pushed[number] = time.perf_counter()
            known = {**self._arguments, **arguments}
            self._waiting.append(ImageRequest(number=number, arguments=known, seed=self._options.seed))
            self._order()
            return number

    def push_frame(self, image: Any, **arguments: Any) -> int:
        """Push the next frame of a camera, a video or a folder: `push(image=image)`."""
        return self.push(image=image, **arguments)

    def map(self, requests: Iterable[Mapping[str, Any]]) -> Iterator[ImageResult]:
        """Push all of these, as fast as there is credit, and yield their images. The stream ends with them."""
        for arguments in requests:
            while self._is_full():
                if (result := next(self, None)) is None:
                    return
                yield result
            with self._changed:
                if self._takes_no_more:
                    break  # it was stopped, or its error comes below
                self.push(**arguments)
        self.stop()
        yield from self

    def set(self, **arguments: Any) -> int:
        """Set arguments such as `prompt` for all further images; returns the number of the first of them.

        Raises PlanError once the stream takes no more images.
        """
        with self._changed:
            self._check_running()
            self._arguments.update(arguments)
            return self._number

    @property
    def _takes_no_more(self) -> bool:
        return self._is_stopping or self.is_over

    def _check_running(self) -> None:
        if self._takes_no_more:
            raise PlanError("this stream takes no more images: begin another one")

    def _is_full(self) -> bool:
        """Wait until an image can be pushed, or one that is ready has to be taken first; returns whether it has to."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or not self._waiting or self.is_over)
            return bool(self._waiting) and not self.is_over

    def _wait_for_room(self) -> None:
        """With intake "all", wait until no image waits for credit. Raises PlanError after a minute."""
        has_room = self._options.intake == "latest"
        if not has_room and not self._changed.wait_for(lambda: not self._waiting or self.is_over, PUSH_SECONDS):
            raise PlanError(
                f"no image was taken for {PUSH_SECONDS:g} s, and {self.in_flight} are in flight: take them in another "
                "thread, or use map()"
            )

    def _effect(self, number: int) -> int:
        return number

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        ranks = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in self._todo]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        with self._changed:
            self._end(self._failure)

    def _serve(self, rank: int) -> None:
        """Run one rank, in a thread of its own, until the stream ends or the rank is given up."""
        goes_on = True
        while goes_on:
            error: Exception | None = None
            try:
                self._run(rank, on_event=self._on_event, on_start=partial(self._on_rank, rank))
            except Exception as raised:  # noqa: BLE001  the consumer gets it
                error = raised
            with self._changed:
                self._sends.pop(rank, None)
                goes_on = error is not None and self._goes_on(rank, error)
                self._order()
                self._changed.notify_all()

    def _goes_on(self, rank: int, error: Exception) -> bool:
        """Give the requests of a rank that has ended back; return whether it is started anew."""
        if self.status == "cancelled" or self._failure is not None:
            return False
        self._left_over.extendleft(reversed(self._todo.pop(rank).values()))
        self._deaths[rank] += 1
        is_given_up = self._deaths[rank] >= PATIENCE or not isinstance(error, LOST)
        if isinstance(error, (*LOST, LaunchError)) and is_given_up and self._todo:
            log.warning(
                "rank %d of this stream has failed; it continues with %d ranks: %s", rank, len(self._todo), error
            )
            return False
        if is_given_up or not self._take_restart():
            self._failure = error
            self._order_cancel()
            return False
        self._todo[rank], self.status = {}, "degraded"
        return True

    def _on_rank(self, rank: int, send: SendToRank) -> None:
        """A rank runs and can receive messages."""
        with self._changed:
            self._sends[rank] = partial(send, rank)
            if self.status == "cancelled" or self._failure is not None:
                self._end_ranks()
            else:
                self._order()

    def _on_event(self, rank: int, event: Any) -> None:
        with self._changed:
            if isinstance(event, GeneratedImage) and self.status != "cancelled":
                self._todo[rank].pop(event.number)
                self._deaths[rank] = 0
                self._note_recovery()
                self._generated[event.number] = event.image
                for number in [*takewhile(self._generated.__contains__, self._pushed)]:
                    image, latency = self._generated.pop(number), time.perf_counter() - self._pushed.pop(number)
                    self._put(ImageResult(number=number, image=image, latency=latency))
                self._order()
                self._changed.notify_all()

    def _upcoming(self) -> int:
        return self._waiting[0].number if self._waiting else self._number

    def _order(self) -> None:
        """Request images as far as there is credit, and end the ranks when there are no more."""
        while self._left_over and (rank := self._free_rank()) is not None:
            self._request(rank, self._left_over.popleft())
        may_begin = not self._is_paused or self._is_stopping
        while may_begin and self._waiting and (rank := self._free_rank()) is not None and self._take_credit():
            self._request(rank, self._waiting.popleft())
            self._changed.notify_all()
        has_work = self._waiting or self._left_over or any(self._todo.values())
        if self._is_stopping and not has_work:
            self._end_ranks()

    def _free_rank(self) -> int | None:
        """The rank with the fewest requests, in turn; None if all have enough."""
        count = self._options.ranks
        ranks = sorted(self._sends, key=lambda rank: (len(self._todo[rank]), (rank - self._latest - 1) % count))
        return ranks[0] if ranks and len(self._todo[ranks[0]]) < QUEUED else None

    def _request(self, rank: int, request: ImageRequest) -> None:
        self._todo[rank][request.number], self._latest = request, rank
        self._sends[rank](request)

    def _end_ranks(self) -> None:
        while self._sends:
            _, send = self._sends.popitem()
            send(EndStream())

    def _order_cancel(self) -> None:
        self._is_stopping = True
        self._waiting.clear()
        self._left_over.clear()
        self._end_ranks()
