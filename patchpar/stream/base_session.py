"""Base class of all stream sessions: orders to the ranks as far as there is credit, iteration, and controls."""

import asyncio
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Generic, Literal, TypeVar

from patchpar.errors import PlanError, WorkerDied, WorkerHung
from patchpar.launch.executor import SendToRank
from patchpar.launch.fork_guard import check_owner
from patchpar.plan.scalars import is_whole
from patchpar.stream.delivery import Output, OutputQueue

CLOSE_SECONDS = 60.0
LOST = (WorkerDied, WorkerHung)
"""Errors after which a stream goes on with other workers. What a worker raises it would raise again."""
RENEWED = 60.0
"""Seconds after which a restart is forgotten: what happens once an hour should not end a stream."""
Status = Literal["running", "paused", "degraded", "finished", "cancelled", "failed"]
T = TypeVar("T")
E = TypeVar("E")
S = TypeVar("S", bound="Closing")


class Restarts:
    """At most `count` restarts within RENEWED seconds."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """Take one of the restarts that are left; False if there is none."""
        now = time.monotonic()
        while self._taken and self._taken[0] < now - RENEWED:
            self._taken.popleft()
        if len(self._taken) >= self._count:
            return False
        self._taken.append(now)
        return True


class Closing(ABC):
    """Closed at the end of its `with` block, plain or async."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Idempotent."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self: S) -> S:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class BaseSession(Closing, Generic[T, E]):
    """One stream on some ranks, which a thread of its own runs. All public methods are thread-safe.

    T: type of its items. E: result of a control, made from a block or image number. `credit`: blocks, or images, that
    may have begun and not been taken; `in_flight`: those that have. `status`: its state; "degraded": a worker has died,
    and the stream is being resumed. `_changed` guards the state, and is notified of every change; most methods with a
    leading underscore are called while it is held. Raises PlanError.
    """

    _patience: float | None = None
    """Seconds to wait for an item before `_on_timeout` is called."""

    def __init__(self, credit: int, output: Output, lead: int) -> None:
        if not is_whole(credit):
            raise PlanError(f"credit={credit!r}: it must be at least 1 block")
        self._changed = threading.Condition(threading.RLock())
        self._owner = os.getpid()
        self._outputs: OutputQueue[T] = OutputQueue(output, lead, self._give_back)
        self._credit, self.in_flight = credit, 0
        self.status: Status = "running"
        self._error: Exception | None = None
        self._send: SendToRank | None = None
        self._is_paused = self._is_stopping = False
        self._thread = threading.Thread(target=self._drive, name="patchpar-stream", daemon=True)

    # --- items ------------------------------------------------------------------------------------------------------

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
                if self._error is not None:
                    raise self._error
                raise StopIteration
            item = self._outputs.take()
        try:
            self._on_output(item)
        finally:  # also if ctrl-C ends a wait for the time of an item, which is lost then
            self._give_back()
        return item

    def __aiter__(self) -> AsyncIterator[T]:
        """Iterate without blocking the event loop. An item for which a wait was ended is the next one."""
        return _AsyncItems(self)

    def _on_timeout(self) -> T | None:
        """An item to return while none is ready, or None. Under the lock."""
        return None

    def _on_output(self, item: T) -> None:
        """Called before an item is returned and its credit given back, without the lock."""

    @property
    def dropped(self) -> int:
        """Items dropped for a slow consumer, or flushed."""
        return self._outputs.dropped

    # --- controls ---------------------------------------------------------------------------------------------------

    def pause(self) -> E:
        """Begin nothing further until `resume`; what is in flight is still delivered.

        Raises PlanError once it has ended.
        """
        self._check_running()
        return self._set_paused(True)

    def resume(self) -> E:
        """Continue after `pause`. Raises PlanError once it has ended."""
        self._check_running()
        return self._set_paused(False)

    def flush(self) -> int:
        """Drop all items that are ready; returns how many."""
        with self._changed:
            return self._outputs.flush()

    def stop(self) -> E:
        """Begin nothing further; iteration ends after what was requested has been delivered."""
        with self._changed:
            self._is_stopping = True
            return self._look()

    def cancel(self) -> None:
        """End now: iteration ends, and what is in flight is dropped."""
        with self._changed:
            self._outputs.clear()
            self._cancel()

    def close(self) -> None:
        """Cancel the stream and wait until the ranks are free. Raises PlanError if they are not within a minute."""
        self._cancel()
        if not self.is_free_within(CLOSE_SECONDS):
            raise PlanError(f"the ranks did not end the stream within {CLOSE_SECONDS:g} s: close the pipeline")

    def is_free_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the ranks to be free of this stream; returns whether they are."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def is_over(self) -> bool:
        """Whether no further item comes, beyond those that are ready."""
        return self.status in ("finished", "cancelled", "failed")

    def _check_running(self) -> None:
        if self.is_over:
            raise PlanError(f"this stream is {self.status}: begin another one")

    def _set_paused(self, is_paused: bool) -> E:
        with self._changed:
            self._is_paused = is_paused
            if self.status in ("running", "paused"):
                self.status = "paused" if is_paused else "running"
            return self._look()

    def _cancel(self) -> None:
        with self._changed:
            if not self.is_over:
                self.status = "cancelled"
                self._order_cancel()
            self._changed.notify_all()

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _look(self) -> E:
        """Send orders that have become possible, with or without the lock. Returns the effect at what was next."""
        with self._changed:
            effect = self._effect(self._upcoming())
            self._order()
            return effect

    def _give_back(self) -> None:
        """Return the credit of an item that the consumer has taken, or lost."""
        with self._changed:
            assert self.in_flight, "more credit is returned than was taken"
            self.in_flight -= 1
            self._look()

    def _take_credit(self) -> bool:
        """Take credit for one block or image; False if there is none."""
        has_credit = self.in_flight < self._credit
        self.in_flight += has_credit
        return has_credit

    def _on_start(self, send: SendToRank) -> None:
        """The ranks are running and can receive messages. Called without the lock."""
        with self._changed:
            self._send = send
            if self.status == "cancelled":
                self._order_cancel()
            else:
                self._order()

    def _note_recovery(self) -> None:
        """An output has come: a stream that was being resumed goes on."""
        if self.status == "degraded":
            self.status = "paused" if self._is_paused else "running"

    def _end(self, error: Exception | None = None) -> None:
        self._send = None
        if self.status != "cancelled":
            self.status, self._error = "finished" if error is None else "failed", error
        self._changed.notify_all()

    @abstractmethod
    def _drive(self) -> None:
        """Run the ranks, in the thread and without the lock."""

    @abstractmethod
    def _upcoming(self) -> int:
        """The number of the next block or image to begin."""

    @abstractmethod
    def _effect(self, number: int) -> E:
        """The result of a control that takes effect at this block or image."""

    @abstractmethod
    def _order(self) -> None:
        """Send what can be begun to the ranks."""

    @abstractmethod
    def _order_cancel(self) -> None:
        """Tell the ranks that the stream is cancelled."""


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
