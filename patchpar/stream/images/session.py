"""A stream of pictures as its user holds it: frames or requests in, pictures out in the same order.

push ---> [ a few that wait ] ---> every rank                  as soon as there is credit
for shot in session  <--- [ at most as many as there is credit ] <--- [ their order ] <--- ranks
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from patchpar.errors import PlanError
from patchpar.launch.executor import Tell
from patchpar.launch.fork_guard import check_owner
from patchpar.stream.flow_control import BlockCredits
from patchpar.stream.images.messages import GeneratedImage, ImageRequest
from patchpar.stream.messages import EndStream
from patchpar.stream.output_queue import Output, OutputQueue, check_output
from patchpar.stream.resources import Closing

Intake = Literal["all", "latest"]
CLOSE_SECONDS = PUSH_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageResult:
    """A picture as the pipeline returned it. `number`: which push it answers. `latency`: seconds since that push."""

    number: int
    picture: Any
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStreamOptions:
    """How a stream of pictures runs. Raises PlanError.

    `intake`: with "all" a push waits for room, with "latest" a newer frame takes the place of one that waits. `output`:
    while the watcher is slow, "block" waits; "drop_oldest" and "skip_to_live" lose pictures. `lead`: pictures that may
    be ready beyond one under way on each rank. `seed`: of every picture.
    """

    ranks: int
    seed: int
    intake: Intake = "all"
    output: Output = "block"
    lead: int = 2

    def __post_init__(self) -> None:
        check_output(self.output)
        if self.lead < 1:
            raise PlanError(f"lead={self.lead}: at least 1")
        if self.intake not in get_args(Intake):
            raise PlanError(f"intake={self.intake!r}: use one of {', '.join(get_args(Intake))}")
        if not 0 <= self.seed < 2**63:
            raise PlanError(f"seed={self.seed}: it must be at least 0 and below 2**63")


class ImageSession(Closing):
    """One stream of pictures. A context manager and an iterator, plain and async."""

    def __init__(self, run: Callable[..., Any], manner: ImageStreamOptions, arguments: Mapping[str, Any]) -> None:
        self._run, self._manner, self._arguments = run, manner, dict(arguments)
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._credits = BlockCredits(manner.ranks + manner.lead)
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._outlet: OutputQueue[ImageResult] = OutputQueue(manner.output, manner.lead, self._credits.give_back)
        self._pushed: dict[int, float] = {}
        self._due: deque[int] = deque()  # ordered, in the order in which they come out
        self._drawn: dict[int, Any] = {}  # those that wait for one before them: ranks end pictures in turn
        self._number = self._replaced = 0
        self._tell: Tell | None = None
        self._is_ending = self._is_over = self._is_cancelled = self._is_paused = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._drive, name="patchpar-pictures", daemon=True)
        self._thread.start()

    def push(self, **arguments: Any) -> int:
        """One more picture, with these arguments of the pipeline beside those of the stream; its number.

        Raises PlanError if the stream has ended, or nobody takes pictures out for a minute.
        """
        with self._changed:
            if self._manner.intake == "all":
                self._wait_for_room()
            self._check_running()
            for number, _ in self._waiting:  # of which "latest" leaves none
                del self._pushed[number]
                self._replaced += 1
            self._waiting.clear()
            number, self._number = self._number, self._number + 1
            self._pushed[number] = time.perf_counter()
            self._waiting.append((number, {**self._arguments, **arguments}))
            self._order()
            return number

    def push_frame(self, image: Any, **arguments: Any) -> int:
        """`push(image=image)`: the next frame of a camera, a film or a folder."""
        return self.push(image=image, **arguments)

    def map(self, requests: Iterable[Mapping[str, Any]]) -> Iterator[ImageResult]:
        """Push all of these and give what comes out, as fast as there is credit. The stream ends with them."""
        for arguments in requests:
            while self._waiting and not self.is_over:
                if (shot := next(self, None)) is None:
                    return
                yield shot
            self.push(**arguments)
        self.stop()
        yield from self

    def set(self, **arguments: Any) -> int:
        """Other arguments for all further pictures, such as `prompt`; the number of the first of them."""
        with self._changed:
            self._check_running()
            self._arguments.update(arguments)
            return self._number

    def pause(self) -> int:
        """Begin no further picture until `resume`; what is under way comes out. The number that is held up."""
        return self._set_paused(True)

    def resume(self) -> int:
        """Go on with the pictures that wait; the number of the first."""
        return self._set_paused(False)

    def flush(self) -> int:
        """Throw away pictures that are ready and have not been taken; how many."""
        with self._changed:
            count = self._outlet.flush()
            self._order()
            return count

    def stop(self) -> None:
        """Take no more pictures; iteration ends when those that were pushed have come out."""
        with self._changed:
            self._is_ending = True
            self._order()

    def cancel(self) -> None:
        """End now; what is under way is drawn and thrown away."""
        with self._changed:
            self._is_cancelled = self._is_ending = True
            self._waiting.clear()
            self._outlet.clear()
            self._order()
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel what is left and wait until the ranks are free. Raises PlanError if they are not within a minute."""
        self.cancel()
        if not self.is_free_within(CLOSE_SECONDS):
            raise PlanError(f"the ranks have not let go of the stream within {CLOSE_SECONDS:g} s")

    def is_free_within(self, seconds: float) -> bool:
        """Wait for the ranks to be free of this stream; whether they are."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def __iter__(self) -> Iterator[ImageResult]:
        return self

    def __next__(self) -> ImageResult:
        """The next picture. Raises what the pipeline raised, or WorkerError; LaunchError in a forked child."""
        check_owner(self._owner)
        with self._changed:
            self._changed.wait_for(lambda: len(self._outlet) or self.is_over)
            if not len(self._outlet):
                if self._error is not None and not self._is_cancelled:
                    raise self._error
                raise StopIteration
            shot = self._outlet.take()
            self._credits.give_back()
            self._order()
            return shot

    async def __aiter__(self) -> AsyncIterator[ImageResult]:
        """The same without blocking the event loop."""
        while (shot := await asyncio.to_thread(next, self, None)) is not None:
            yield shot

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come out, beyond what is ready."""
        return self._is_over or self._is_cancelled

    @property
    def dropped(self) -> int:
        """Frames that a newer one has taken the place of, and pictures lost to a slow watcher or flushed."""
        return self._replaced + self._outlet.dropped

    @property
    def in_flight(self) -> int:
        """Pictures that have begun and have not been taken."""
        return self._credits.in_flight

    def _check_running(self) -> None:
        if self._is_ending or self.is_over:
            raise PlanError("this stream takes no more pictures: begin another one")

    def _set_paused(self, is_paused: bool) -> int:
        with self._changed:
            self._check_running()
            self._is_paused = is_paused
            first = self._waiting[0][0] if self._waiting else self._number
            self._order()
            return first

    def _wait_for_room(self) -> None:
        """Until no picture waits. Called under the lock."""
        if not self._changed.wait_for(lambda: not self._waiting or self._is_over, PUSH_SECONDS):
            raise PlanError(
                f"nobody has taken a picture for {PUSH_SECONDS:g} s, and {self.in_flight} are under way: take them in "
                "another thread, or use map()"
            )

    def _drive(self) -> None:
        error: Exception | None = None
        try:
            self._run(on_event=self._hear, on_start=self._begun)
        except Exception as raised:  # noqa: BLE001  the watcher gets it
            error = raised
        with self._changed:
            self._error, self._is_over, self._tell = error, True, None
            self._changed.notify_all()

    def _begun(self, tell: Tell) -> None:
        with self._changed:
            self._tell = tell
            self._order()

    def _hear(self, rank: int, event: Any) -> None:
        with self._changed:
            if isinstance(event, GeneratedImage) and not self._is_cancelled:
                self._drawn[event.number] = event.picture
                while self._due and self._due[0] in self._drawn:
                    self._release(self._due.popleft())
                self._order()
                self._changed.notify_all()

    def _release(self, number: int) -> None:
        latency = time.perf_counter() - self._pushed.pop(number)
        self._outlet.put(ImageResult(number=number, picture=self._drawn.pop(number), latency=latency))

    def _order(self) -> None:
        """Tell the ranks what is to be drawn, as far as there is credit, and when it was all. Under the lock."""
        goes_on = not self._is_paused or self._is_ending
        while goes_on and self._tell is not None and self._waiting and self._credits.take():
            number, arguments = self._waiting.popleft()
            self._due.append(number)
            self._tell_all(ImageRequest(number=number, arguments=arguments, seed=self._manner.seed))
            self._changed.notify_all()
        if self._is_ending and not self._waiting and self._tell is not None:
            self._tell_all(EndStream())
            self._tell = None

    def _tell_all(self, word: Any) -> None:
        for rank in range(self._manner.ranks):
            assert self._tell is not None
            self._tell(rank, word)
