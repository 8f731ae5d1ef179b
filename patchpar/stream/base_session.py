"""Base class of all stream sessions: iteration, plain and async, and controls."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Generic, TypeVar

from patchpar.errors import PlanError
from patchpar.launch.fork_guard import check_owner
from patchpar.stream.rank_driver import Output, OutputQueue, RankDriver, Status

CLOSE_SECONDS = 60.0
D = TypeVar("D", bound=RankDriver)
T = TypeVar("T")
E = TypeVar("E")
S = TypeVar("S", bound="Closing")


class Closing:
    """Closed at the end of its `with` block, plain or async."""

    def close(self) -> None:
        """Free all resources. Idempotent."""
        raise NotImplementedError

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self: S) -> S:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class BaseSession(Closing, Generic[D, T, E]):
    """A stream that `driver` runs. T: type of its items. E: result of a control, made from a block or image number."""

    _patience: float | None = None
    """Seconds to wait for an item before `_on_timeout` is called."""

    def __init__(self, driver: D, output: Output, lead: int) -> None:
        self._driver, self._changed = driver, driver.changed
        self._owner = os.getpid()
        self._outputs: OutputQueue[T] = OutputQueue(output, lead, driver.give_back)

    def __iter__(self: S) -> S:
        return self

    def __next__(self) -> T:
        """Return the next item. Raises the error of a rank, WorkerError, and LaunchError in a forked child."""
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
        try:
            self._on_output(item)
        finally:  # also if ctrl-C ends a wait for the time of an item, which is lost then
            self._driver.give_back()
        return item

    def __aiter__(self) -> AsyncIterator[T]:
        """Iterate without blocking the event loop. An item for which a wait was ended is the next one."""
        return _AsyncItems(self)

    def pause(self) -> E:
        """Begin nothing further until `resume`; what is in flight is still delivered.

        Raises PlanError once it has ended.
        """
        self._check_running()
        return self._effect(self._driver.pause(True))

    def resume(self) -> E:
        """Continue after `pause`. Raises PlanError once it has ended."""
        self._check_running()
        return self._effect(self._driver.pause(False))

    def flush(self) -> int:
        """Drop all items that are ready; returns how many."""
        with self._changed:
            return self._outputs.flush()

    def stop(self) -> E:
        """Begin nothing further; iteration ends after what was requested has been delivered."""
        return self._effect(self._driver.stop())

    def cancel(self) -> None:
        """End now: iteration ends, and what is in flight is dropped."""
        with self._changed:
            self._outputs.clear()
            self._driver.cancel()

    def close(self) -> None:
        """Cancel the stream and wait until the ranks are free. Raises PlanError if they are not within a minute."""
        self._driver.cancel()
        if not self.is_free_within(CLOSE_SECONDS):
            raise PlanError(f"the ranks did not end the stream within {CLOSE_SECONDS:g} s: close the pipeline")

    def is_free_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the ranks to be free of this stream; returns whether they are."""
        return self._driver.join(seconds)

    @property
    def status(self) -> Status:
        """The state of the stream. "degraded": a worker has died, and the stream is being resumed."""
        return self._driver.status

    @property
    def is_over(self) -> bool:
        """Whether no further item comes, beyond those that are ready."""
        return self._driver.is_over

    @property
    def dropped(self) -> int:
        """Items dropped for a slow consumer, or flushed."""
        return self._outputs.dropped

    @property
    def in_flight(self) -> int:
        """Blocks, or images, that have begun and have not been taken."""
        return self._driver.in_flight

    def _check_running(self) -> None:
        if self.is_over:
            raise PlanError(f"this stream is {self.status}: begin another one")

    def _on_timeout(self) -> T | None:
        """An item to return while none is ready, or None. Under the lock."""
        return None

    def _on_output(self, item: T) -> None:
        """Called before an item is returned and its credit given back."""

    def _effect(self, number: int) -> E:
        raise NotImplementedError


class _AsyncItems(Generic[T]):
    """Items of an iterator, each awaited in a thread. A wait that is cancelled (`asyncio.wait_for`) loses none."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._next: asyncio.Future[T | None] | None = None  # under way

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if self._next is None:
            self._next = asyncio.ensure_future(asyncio.to_thread(next, self._items, None))
        try:
            item = await asyncio.shield(self._next)
        except Exception:
            self._next = None
            raise
        self._next = None
        if item is None:
            raise StopAsyncIteration
        return item
