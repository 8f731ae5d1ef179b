"""Whether ranks that have nothing to do would take a request: each is asked so often that a silent one is noticed soon.

A rank that works is watched by its call, which has a deadline of its own.
"""

import logging
import threading
import time
from collections.abc import Callable

from patchpar.errors import CallCancelled, PatchparError

PERIOD_SECONDS = 0.5
"""Between an answer of a rank and the next question."""
SILENT_SECONDS = 2.0
"""A rank that has not answered for so long does not count as ready."""
log = logging.getLogger(__name__)


class RankPings:
    """Of `count` ranks. `ping(rank, is_cancelled)` returns once a rank has answered, or raises.

    A worker that has ended is started again by a ping, as by any call. Times are those of `clock`, in seconds.
    """

    def __init__(
        self,
        ping: Callable[[int, Callable[[], bool]], object],
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ping, self._clock = ping, clock
        self._answered = [clock()] * count
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def note(self, rank: int) -> None:
        """Note that a rank has answered: a ping, or by the end of a call."""
        self._answered[rank] = self._clock()

    def is_silent(self, rank: int) -> bool:
        """Whether a rank that has nothing to do has not answered for too long."""
        return bool(self._threads) and self._clock() - self._answered[rank] > SILENT_SECONDS

    def start(
        self,
        is_idle: Callable[[int], bool],
        lose: Callable[[int], object],
        is_overdue: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        """Begin to ask. `is_idle`: whether a rank has nothing to do.

        `lose` is called with one that has failed, and with one that `is_overdue`: it has not been replaced since then.
        """
        self._is_idle, self._lose, self._is_overdue = is_idle, lose, is_overdue
        for rank in range(len(self._answered)):
            self.note(rank)
            thread = threading.Thread(target=self._watch, args=(rank,), name=f"patchpar-ping-{rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _watch(self, rank: int) -> None:
        while not self._closing.wait(PERIOD_SECONDS):
            if self._is_overdue(rank):
                self._lose(rank)
            if self._is_idle(rank) and not self._asks(rank):
                return

    def _asks(self, rank: int) -> bool:
        """Ask a rank once. Return whether to ask it again, later: not once the pipeline has been closed."""
        try:
            self._ping(rank, lambda: self._closing.is_set() or not self._is_idle(rank))
        except CallCancelled:
            return True  # it has something to do
        except RuntimeError as error:  # LaunchError, WorkerError, or of the device of a rank in this process
            if not self._closing.is_set():
                log.warning("rank %d does not answer: %s", rank, str(error).partition("\n")[0])
                self._lose(rank)
        except PatchparError:
            return False
        else:
            self.note(rank)
        return True

    def close(self) -> None:
        """Ask no more; a question that has been put is not waited for. Idempotent."""
        self._closing.set()
