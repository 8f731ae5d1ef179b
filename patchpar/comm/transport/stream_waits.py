"""Waiting for NCCL: the GPU's stream waits for the messages, and the process continues.

`dist.Work.wait(timeout)` of NCCL blocks the *process*, which polls every millisecond and enqueues nothing meanwhile: at
a hundred exchanges in a step that costs more than the exchanges. So works are awaited without a timeout, and the
duration is measured with two events of the stream.

The deadline is checked by a thread, since the process may be blocked in a synchronisation with the stream. It asks the
event that the stream has recorded after the wait. Once one is late, all groups are aborted: the stream goes on, and the
next exchange raises ExchangeError.

The event before the wait tells a GPU that works from one that waits, which NCCL's kernel uses as well: once this event
is complete and the one after it is not, the stream waits for another rank. The deadline is of that time alone: the
process enqueues a wait long before the GPU comes to it, where a call of the network takes minutes. Another rank may
have to compute for as long as this one, so that what has been seen of that is added.

NCCL connects two ranks, for each kind of operation, in the first call of it, which returns when both have made it: then
it is the process that waits. The thread sees that as well, and aborts the groups.

Captured graphs with messages in them are noted here, since they have to be released before the groups end.
"""

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from patchpar.errors import ExchangeError
from patchpar.launch.accelerators import timing_events
from patchpar.launch.hang_detection import WORK_TIMES

GLANCE = 0.5  # seconds between two looks at works in flight
POLL = 1e-3
GONE = ", as a rank is gone"


class StreamStall(NamedTuple):
    """How long a stream has waited: the time between two timing events that were recorded before and after."""

    begin: Any
    end: Any

    def seconds(self, *, block: bool) -> float | None:
        """Return its duration; None while it lasts, unless `block`, which synchronises."""
        if block:
            self.end.synchronize()
        elif not self.end.query():
            return None
        return float(self.begin.elapsed_time(self.end)) / 1e3


class Enqueued:
    """An exchange that the current stream carries out where it was begun: there is nothing to wait for."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once: what follows on the stream comes after the exchange."""
        return True


ENQUEUED: Any = Enqueued()
Awaited = tuple[float, Callable[[], bool] | None, Callable[[], bool], Callable[[], str]]
"""What a stream waits for: since when, whether all is complete that the stream had to do before (None where it computes
and waits in one), whether it is over, and what names rank, exchange point, peers and shapes. A tuple, which costs no
call of Python in every exchange.
"""

Begun = tuple[float, int, str]
"""An exchange that the process is about to begin: since when, its rank, and where."""


class StreamWaits:
    """Works that streams wait for, of devices of type `kind`.

    `begun` is set by who begins an exchange, until that has returned. An attribute, for the same reason as above.

    `deadline` returns the limit of one in seconds, which may change.
    `on_late` is called once, by any thread, with what has not arrived. `report` gets at each look whether the stream
    waits. `is_cut`: whether a rank is known to be gone, so that nothing further arrives. `on_thread` is called by the
    thread that asks the GPU before it does: threads begin on GPU 0, where the first question would make a context.
    """

    def __init__(
        self,
        kind: str,
        deadline: Callable[[], float],
        on_late: Callable[[str], object],
        report: Callable[[bool], object],
        is_cut: Callable[[], bool] = lambda: False,
        on_thread: Callable[[], object] = lambda: None,
    ) -> None:
        self._event, self._deadline, self._on_late, self._report = timing_events(kind), deadline, on_late, report
        self._is_cut, self._on_thread = is_cut, on_thread
        self._graphs = weakref.WeakSet[Any]()
        self.replays = threading.Lock()
        """Held while a graph is launched: none is released meanwhile."""
        self._awaited: deque[Awaited] = deque()
        self.begun: Begun | None = None
        self._lock = threading.Lock()
        self._news = threading.Event()  # set while works are awaited, and at the end
        self.has_news = False  # the same: asking the event costs more
        self._closed = False
        self._paused = 0
        self._captures = False
        self._moved_on = 0.0  # when something awaited was last seen to be over
        self._waits_since = 0.0  # when the stream was first seen to wait for what is next; 0 before
        self._computed = 0.0  # the longest time that it has been seen to compute before a wait
        self._waits_unseen = False  # whether kernels wait for other ranks before the events, which then show no waits
        self._late = ""
        self._watch: threading.Thread | None = None

    def wait_for(self, works: Sequence[dist.Work], what: Callable[[], str]) -> StreamStall | None:
        """Make the current stream wait. Returns the duration of that; None while a graph is captured.

        The works are not kept: until they are over they would keep what has been received.
        """
        if self._captures:
            for work in works:
                work.wait()
            return None
        begin, end = self._event(), self._event()
        begin.record()
        for work in works:
            work.wait()
        end.record()
        self._awaited.append((time.monotonic(), begin.query, end.query, what))
        if ENQUEUED in works:
            self._waits_unseen = True
        if not self.has_news:
            self.wake_watch()
        return StreamStall(begin, end)

    @property
    def late(self) -> str:
        """What has not arrived in time; empty if nothing is late."""
        return self._late

    def watch(self, is_over: Callable[[], bool], what: Callable[[], str]) -> None:
        """See to it that something which a stream has begun is over before the deadline; `what` says what it is.

        Its time begins when that which the stream began before is over.
        """
        self._awaited.append((time.monotonic(), None, is_over, what))
        if not self.has_news:
            self.wake_watch()

    def wake_watch(self) -> None:
        """Let the thread look; it looks again after it has cleared `has_news`: nothing is missed without a lock."""
        self.has_news = True
        if self._watch is None:
            self._watch = threading.Thread(target=self._watch_over, name="patchpar-deadline", daemon=True)
            self._watch.start()
        self._news.set()

    def settle(self) -> None:
        """Block until all works are complete. Raises ExchangeError."""
        self.look()
        while self._awaited and not self._closed:
            if self._late:
                raise ExchangeError(self._late)
            time.sleep(POLL)
            self.look()

    def finish(self) -> None:
        """Block until the current stream has done all that it has begun: after `settle`, this is computing only."""
        end = self._event()
        end.record()
        end.synchronize()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No thread asks the GPU for events meanwhile: that would break the capture of a graph."""
        with self._lock:
            self._paused += 1
            self._report(False)
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """This thread captures a graph: works awaited in it have no end that could be asked for, and no duration."""
        with self.paused():
            self._captures = True
            try:
                yield
            finally:
                self._captures = False

    @property
    def are_captured(self) -> bool:
        """Whether a graph is captured now: nothing is sent, so that an error leaves no message between ranks."""
        return self._captures

    def add_graph(self, graph: Any) -> None:
        """Note a captured graph in which works are awaited."""
        with self._lock:
            self._graphs.add(graph)

    def release_graphs(self) -> None:
        """Release all captured graphs, which cannot be replayed again; one that runs ends first. Idempotent."""
        with self._lock:
            found = list(self._graphs)
            self._graphs.clear()
        for graph in found:
            with contextlib.suppress(RuntimeError), self.replays:  # of torch: the device has failed
                graph.reset()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._report(False)
        self._news.set()

    def _watch_over(self) -> None:
        self._on_thread()
        while not self._closed and not self._late:
            self._news.wait()
            time.sleep(GLANCE)
            self.look()
            if not self._awaited and self.begun is None and not self._closed:
                self.has_news = False
                self._news.clear()
                if self._awaited or self.begun is not None or self._closed:  # meanwhile
                    self.has_news = True
                    self._news.set()

    def look(self) -> None:
        """Forget works that are complete; report the first that is late."""
        if self._begins_too_long():
            self._on_late(self._late)
        with self._lock:
            if self._paused or self._late:
                return
            while self._awaited and self._awaited[0][2]():
                self._awaited.popleft()
                self._moved_on, self._waits_since = time.monotonic(), 0.0
            if not self._awaited:
                self._report(self._begin_lasts())
                return
            since, has_begun, _, what = self._awaited[0]
            waits = None if has_begun is None else has_begun()
            self._report(not self._closed and (waits is True or self._begin_lasts()))
            lateness = GONE if self._is_cut() else self._lateness(since, waits=waits)
            if not lateness or self._closed:  # whose transport may have other groups by now
                return
            self._late = what() + lateness
            self._report(False)
        self._on_late(self._late)

    def _begin_lasts(self) -> bool:
        """Whether the process waits in a call that begins an exchange, as it seems."""
        begun = self.begun
        return begun is not None and not self._closed and time.monotonic() - begun[0] > GLANCE

    def _begins_too_long(self) -> bool:
        """Note, once, that the process has waited too long in a call that begins an exchange; return whether it has."""
        with self._lock:
            begun = self.begun
            if begun is None or self._late or self._closed:
                return False
            since, rank, where = begun
            lateness = GONE if self._is_cut() else self._beyond_limit(time.monotonic() - since)
            if lateness:
                self._late = f"rank {rank} at {where}: the other ranks have not come to the exchange{lateness}"
            return bool(lateness)

    def _lateness(self, since: float, *, waits: bool | None) -> str:
        """Return how the first awaited exchange is late, for the message; empty if it is not.

        `waits`: whether the stream waits for it, or still computes; None where that cannot be told.
        """
        now, deadline = time.monotonic(), self._deadline()
        passed = now - max(since, self._moved_on)
        if waits is False and not self._waits_unseen:
            self._computed, limit = max(self._computed, passed), WORK_TIMES * deadline
            return "" if passed <= limit else f": the GPU of this rank has not come to that wait within {limit:g} s"
        if waits and not self._waits_unseen:
            self._waits_since = self._waits_since or now
            passed = now - self._waits_since
        return self._beyond_limit(passed)

    def _beyond_limit(self, passed: float) -> str:
        """Return, for the message, how long others had to come; empty if a wait of `passed` seconds is within that."""
        limit = self._deadline() + 2 * self._computed
        return "" if passed <= limit else f" within {limit:g} s"
