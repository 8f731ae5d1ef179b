"""What all streams offer to whoever holds one: iteration, plain and async, and controls."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from patchpar.errors import PlanError
from patchpar.launch.fork_guard import check_owner
from patchpar.stream.output_queue import Output, OutputQueue
from patchpar.stream.rank_driver import RankDriver, Status
from patchpar.stream.resources import Closing

CLOSE_SECONDS = 60.0
D = TypeVar("D", bound=RankDriver)
T = TypeVar("T")
E = TypeVar("E")
S = TypeVar("S", bound="BaseSession")  # type: ignore[type-arg]


class BaseSession(Closing, Generic[D, T, E]):
    """A stream that `driver` runs, which gives items T. E: what a control returns, from a block's or image's number."""

    _patience: float | None = None
    """Seconds to wait for an item before `_on_timeout` is asked for one."""

    def __init__(self, driver: D, output: Output, lead: int) -> None:
        self._driver, self._changed = driver, driver.changed
        self._owner = os.getpid()
        self._outputs: OutputQueue[T] = OutputQueue(output, lead, driver.give_back)

    def __iter__(self: S) -> S:
        return self

    def __next__(self) -> T:
        """The next item. Raises what a rank has raised, WorkerError, and LaunchError in a forked child."""
        check_owner(self._owner)
        with self._changed:
            while not self._changed.wait_for(lambda: len(self._outputs) or self.is_over, self._patience):
                if (item := self._on_timeout()) is not None:
                    return item
            if not len(self._outputs):
                if self._driver.error is not None:
                    raise self._driver.error
                raise StopIteration
            item = self._outputs.take()
        self._on_output(item)
        self._driver.give_back()
        return item

    async def __aiter__(self) -> AsyncIterator[T]:
        """The same without blocking the event loop."""
        while (item := await asyncio.to_thread(next, self, None)) is not None:
            yield item

    def pause(self) -> E:
        """Begin nothing further until `resume`; what is under way comes out."""
        self._check_running()
        return self._effect(self._driver.pause(True))

    def resume(self) -> E:
        """Continue after `pause`."""
        self._check_running()
        return self._effect(self._driver.pause(False))

    def flush(self) -> int:
        """Drop what is ready and has not been taken; how many."""
        with self._changed:
            return self._outputs.flush()

    def stop(self) -> E:
        """Begin nothing beyond what was asked for; iteration ends when that has come out."""
        return self._effect(self._driver.stop())

    def cancel(self) -> None:
        """End now: iteration ends, and what is under way is dropped."""
        with self._changed:
            self._outputs.clear()
            self._driver.cancel()

    def close(self) -> None:
        """Cancel what is left and wait until the ranks are free. Raises PlanError if they are not within a minute."""
        self._driver.cancel()
        if not self.is_free_within(CLOSE_SECONDS):
            raise PlanError(f"the ranks have not let go of the stream within {CLOSE_SECONDS:g} s")

    def is_free_within(self, seconds: float) -> bool:
        """Wait for the ranks to be free of this stream; whether they are."""
        return self._driver.join(seconds)

    @property
    def status(self) -> Status:
        """The state of the stream. "degraded": a worker has died, and the stream is being resumed."""
        return self._driver.status

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come out, beyond what is ready."""
        return self._driver.is_over

    @property
    def dropped(self) -> int:
        """Items lost to a slow consumer, or flushed."""
        return self._outputs.dropped

    @property
    def in_flight(self) -> int:
        """Blocks, or images, that have begun and have not been taken."""
        return self._driver.in_flight

    def _check_running(self) -> None:
        if self.is_over:
            raise PlanError(f"this stream is {self.status}: begin another one")

    def _on_timeout(self) -> T | None:
        """An item to give while none is ready. Under the lock."""
        return None

    def _on_output(self, item: T) -> None:
        """Before an item is given, and its credit with it."""

    def _effect(self, number: int) -> E:
        raise NotImplementedError
