"""`RankDriver`: sends orders to the ranks of one stream from its own thread, as far as there is credit for outputs."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, get_args

from patchpar.errors import PlanError, WorkerDied, WorkerHung
from patchpar.launch.executor import SendToRank
from patchpar.plan.scalars import is_whole

Output = Literal["block", "drop_oldest", "skip_to_live"]
LOST = (WorkerDied, WorkerHung)
"""Errors after which a stream goes on with other workers. What a worker raises it would raise again."""
RENEWED = 60.0
"""Seconds after which a restart is forgotten: what happens once an hour should not end a stream."""
T = TypeVar("T")
Status = Literal["running", "paused", "degraded", "finished", "cancelled", "failed"]


def check_output(output: str, lead: int, restarts: int) -> None:
    """Raise PlanError for an unknown policy, `lead` below 1 output, or `restarts` below 0."""
    if output not in get_args(Output):
        raise PlanError(f"output={output!r}: use one of {', '.join(get_args(Output))}")
    if not is_whole(lead) or not is_whole(restarts, 0):
        raise PlanError(
            f"lead={lead!r}, restarts={restarts!r}: use whole numbers, lead at least 1 and restarts at least 0"
        )


class OutputQueue(Generic[T]):
    """A queue used under its owner's lock. `lost` is called for each item that is dropped.

    `output`: "block" keeps all; "drop_oldest" keeps the newest `room`; "skip_to_live" keeps as many, and `take` returns
    the newest only.
    """

    def __init__(self, output: Output, room: int, lost: Callable[[], object]) -> None:
        self._output, self._room, self._lost = output, room, lost
        self._ready: deque[T] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, item: T) -> None:
        self._ready.append(item)
        if self._output != "block":
            self._drop(len(self._ready) - self._room)

    def take(self) -> T:
        """Remove and return the next item. The queue must not be empty."""
        if self._output == "skip_to_live":
            self._drop(len(self._ready) - 1)
        return self._ready.popleft()

    def flush(self) -> int:
        """Drop all items; returns how many."""
        count = len(self._ready)
        self._drop(count)
        return count

    def clear(self) -> None:
        """Remove all items without calling `lost`, at the end of a stream."""
        self._ready.clear()

    def _drop(self, count: int) -> None:
        for _ in range(max(0, count)):
            self._ready.popleft()
            self.dropped += 1
            self._lost()


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


class RankDriver:
    """One stream on `ranks` ranks. All public methods are thread-safe. Raises PlanError.

    `credit`: blocks, or images, that may have begun and not been taken; `in_flight`: those that have. `changed` guards
    the state, and is notified of every change; methods with a leading underscore are called while it is held.
    """

    def __init__(self, ranks: int, credit: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.status: Status = "running"
        self.error: Exception | None = None
        if not is_whole(credit):
            raise PlanError(f"credit={credit!r}: it must be at least 1 block")
        self._num_ranks, self._credit, self.in_flight = ranks, credit, 0
        self._send: SendToRank | None = None
        self._is_paused = self._is_stopping = False
        self._thread = threading.Thread(target=self._drive, name="patchpar-stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the stream to end; returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_over(self) -> bool:
        """Whether no further output comes."""
        return self.status in ("finished", "cancelled", "failed")

    def give_back(self) -> None:
        """Return the credit of an output that the consumer has taken, or lost."""
        with self.changed:
            assert self.in_flight, "more credit is returned than was taken"
            self.in_flight -= 1
            self.look()

    def upcoming(self) -> int:
        with self.changed:
            return self._upcoming()

    def look(self) -> int:
        """Send orders that have become possible. Returns the number that was next before."""
        with self.changed:
            number = self._upcoming()
            self._order()
            return number

    def pause(self, is_paused: bool) -> int:
        """Pause or resume: begin nothing while paused. Returns the number that is next."""
        with self.changed:
            self._is_paused = is_paused
            if self.status in ("running", "paused"):
                self.status = "paused" if is_paused else "running"
            return self.look()

    def stop(self) -> int:
        """Begin nothing further; what is in flight is still delivered. Returns the number that is next."""
        with self.changed:
            self._is_stopping = True
            return self.look()

    def cancel(self) -> None:
        """End the stream without further output."""
        with self.changed:
            if not self.is_over:
                self.status = "cancelled"
                self._order_cancel()
            self.changed.notify_all()

    def _on_start(self, send: SendToRank) -> None:
        """The ranks are running and can receive messages."""
        with self.changed:
            self._send = send
            if self.status == "cancelled":
                self._order_cancel()
            else:
                self._order()

    def _note_recovery(self) -> None:
        """An output has come: a stream that was being resumed goes on."""
        if self.status == "degraded":
            self.status = "paused" if self._is_paused else "running"

    def _take_credit(self) -> bool:
        """Take credit for one block or image; False if there is none."""
        has_credit = self.in_flight < self._credit
        self.in_flight += has_credit
        return has_credit

    def _send_to_all(self, message: Any) -> None:
        for rank in range(self._num_ranks):
            if self._send is not None:
                self._send(rank, message)

    def _end(self, error: Exception | None = None) -> None:
        self._send = None
        if self.status != "cancelled":
            self.status, self.error = "finished" if error is None else "failed", error
        self.changed.notify_all()

    def _drive(self) -> None:
        """Run the ranks, in the thread and without the lock."""
        raise NotImplementedError

    def _upcoming(self) -> int:
        """The number of the next block or image to begin."""
        raise NotImplementedError

    def _order(self) -> None:
        raise NotImplementedError

    def _order_cancel(self) -> None:
        raise NotImplementedError
