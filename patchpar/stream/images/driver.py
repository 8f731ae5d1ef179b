"""`ImageDriver`: sends requests to the ranks of an image stream, and delivers images in the order of their pushes.

push ---> [ waiting requests ] ---> every rank, as soon as there is credit
deliver  <--- [ reordering ] <--- ranks, which finish images in turn
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole, make_plain
from patchpar.stream.messages import EndStream, GeneratedImage, ImageRequest
from patchpar.stream.rank_driver import Output, RankDriver, check_output

Intake = Literal["all", "latest"]
PUSH_SECONDS = 60.0


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
    one in flight on each rank. `seed`: of every image.
    """

    ranks: int
    seed: int
    intake: Intake = "all"
    output: Output = "block"
    lead: int = 2

    def __post_init__(self) -> None:
        make_plain(self)
        check_output(self.output)
        if not is_whole(self.lead):
            raise PlanError(f"lead={self.lead!r}: it must be a whole number of at least 1")
        if self.intake not in get_args(Intake):
            raise PlanError(f"intake={self.intake!r}: use one of {', '.join(get_args(Intake))}")
        if not is_whole(self.seed, 0, 2**63 - 1):
            raise PlanError(f"seed={self.seed!r}: it must be a whole number of at least 0 and below 2**63")


class ImageDriver(RankDriver):
    """See RankDriver. `run(on_event=, on_start=)` runs the ranks. `deliver`: called with each image, under the lock."""

    def __init__(
        self, run: Callable[..., Any], options: ImageStreamOptions, deliver: Callable[[ImageResult], object]
    ) -> None:
        super().__init__(options.ranks, options.ranks + options.lead)
        self._run, self._options, self._deliver = run, options, deliver
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._pushed: dict[int, float] = {}
        self._due: deque[int] = deque()  # requested numbers, in the order of delivery
        self._generated: dict[int, Any] = {}  # images that wait for an earlier one
        self.number = self.replaced = 0  # number: of the next push

    @property
    def takes_more(self) -> bool:
        """Whether images can be pushed."""
        return not self._is_stopping and not self.is_over

    @property
    def has_waiting(self) -> bool:
        """Whether an image waits for credit."""
        return bool(self._waiting)

    def push(self, arguments: Mapping[str, Any]) -> int:
        """Request one more image; returns its number. With intake "latest" it replaces those that wait."""
        with self.changed:
            for number, _ in self._waiting:  # none where the intake is "all"
                del self._pushed[number]
                self.replaced += 1
            self._waiting.clear()
            number, self.number = self.number, self.number + 1
            self._pushed[number] = time.perf_counter()
            self._waiting.append((number, arguments))
            self._order()
            return number

    def wait_for_room(self) -> None:
        """With intake "all", wait until no image waits for credit. Raises PlanError after a minute."""
        has_room = self._options.intake == "latest"
        if not has_room and not self.changed.wait_for(lambda: not self._waiting or self.is_over, PUSH_SECONDS):
            raise PlanError(
                f"no image was taken for {PUSH_SECONDS:g} s, and {self.in_flight} are in flight: take them in another "
                "thread, or use map()"
            )

    def _drive(self) -> None:
        error: Exception | None = None
        try:
            self._run(on_event=self._on_event, on_start=self._on_start)
        except Exception as raised:  # noqa: BLE001  the consumer gets it
            error = raised
        with self.changed:
            self._end(error)

    def _on_event(self, rank: int, event: Any) -> None:
        with self.changed:
            if isinstance(event, GeneratedImage) and self.status != "cancelled":
                self._generated[event.number] = event.image
                while self._due and self._due[0] in self._generated:
                    self._release(self._due.popleft())
                self._order()
                self.changed.notify_all()

    def _release(self, number: int) -> None:
        latency = time.perf_counter() - self._pushed.pop(number)
        self._deliver(ImageResult(number=number, image=self._generated.pop(number), latency=latency))

    def _upcoming(self) -> int:
        return self._waiting[0][0] if self._waiting else self.number

    def _order(self) -> None:
        """Request images as far as there is credit, and end the ranks when there are no more."""
        may_begin = not self._is_paused or self._is_stopping
        while may_begin and self._send is not None and self._waiting and self._take_credit():
            number, arguments = self._waiting.popleft()
            self._due.append(number)
            self._send_to_all(ImageRequest(number=number, arguments=arguments, seed=self._options.seed))
            self.changed.notify_all()
        if self._is_stopping and not self._waiting and self._send is not None:
            self._send_to_all(EndStream())
            self._send = None

    def _order_cancel(self) -> None:
        self._is_stopping = True
        self._waiting.clear()
        self._order()
