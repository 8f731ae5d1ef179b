"""What gives orders to the ranks of one stream, in a thread of its own: the base for video and for images."""

import threading
from typing import Any, Literal

from patchpar.launch.executor import Tell
from patchpar.stream.flow_control import BlockCredits

Status = Literal["running", "paused", "degraded", "finished", "cancelled", "failed"]


class RankDriver:
    """One stream on `ranks` ranks. All public methods may be called from several threads.

    `credit`: blocks, or images, that may have begun and not been taken. `changed` guards the state, and is notified of
    every change; methods whose names begin with an underscore are called while it is held.
    """

    def __init__(self, ranks: int, credit: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.status: Status = "running"
        self.error: Exception | None = None
        self._num_ranks, self._credits = ranks, BlockCredits(credit)
        self._tell: Tell | None = None
        self._is_paused = self._is_stopping = False
        self._thread = threading.Thread(target=self._drive, name="patchpar-stream", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the end; whether it has come."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def in_flight(self) -> int:
        """Blocks, or images, that have begun and have not been taken."""
        return self._credits.in_flight

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come out."""
        return self.status in ("finished", "cancelled", "failed")

    def give_back(self, count: int = 1) -> None:
        """The consumer has taken, or lost, so many."""
        self._credits.give_back(count)
        self.look()

    def look(self) -> int:
        """Give orders that have become possible. Returns the number that was next before that."""
        with self.changed:
            number = self._upcoming()
            self._order()
            return number

    def pause(self, is_paused: bool) -> int:
        """Begin nothing further, or begin again; the number that is next."""
        with self.changed:
            self._is_paused = is_paused
            if self.status in ("running", "paused"):
                self.status = "paused" if is_paused else "running"
            return self.look()

    def stop(self) -> int:
        """Take no more orders; what is under way comes out. Returns the number that is next."""
        with self.changed:
            self._is_stopping = True
            return self.look()

    def cancel(self) -> None:
        """Nothing more comes out."""
        with self.changed:
            if not self.is_over:
                self.status = "cancelled"
                self._order_cancel()
            self.changed.notify_all()

    def _on_start(self, tell: Tell) -> None:
        """The ranks run, and can be told something."""
        with self.changed:
            self._tell = tell
            if self.status == "cancelled":
                self._order_cancel()
            else:
                self._order()

    def _tell_all(self, message: Any) -> None:
        for rank in range(self._num_ranks):
            if self._tell is not None:
                self._tell(rank, message)

    def _end(self, error: Exception | None = None) -> None:
        """The ranks run no more."""
        self._tell = None
        if self.status != "cancelled":
            self.status, self.error = "finished" if error is None else "failed", error
        self.changed.notify_all()

    def _drive(self) -> None:
        """Run the ranks, in the thread; not under the lock."""
        raise NotImplementedError

    def _upcoming(self) -> int:
        """The number of the next block or image to begin."""
        raise NotImplementedError

    def _order(self) -> None:
        """Give the orders that are possible now."""
        raise NotImplementedError

    def _order_cancel(self) -> None:
        """Have the ranks end."""
        raise NotImplementedError
