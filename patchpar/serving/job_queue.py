"""Jobs before the workers: in order, as many at a time as the workers have room for, observed and cancelled.

    handler --submit--> [ A | B | C ] --threads--> workers
    handler <--view, outcome-- jobs ahead, step, result

Python's ThreadPoolExecutor would be a queue too, but the interpreter waits for its thread on exit, where a call may be
minutes from its next step; it has no limit, and a running job cannot be cancelled.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from patchpar.errors import PatchparError, PlanError, WorkerDied, WorkerHung

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
CLOSE_SECONDS = 1.0  # a first call may be minutes from its next step
log = logging.getLogger(__name__)


class Cancelled(Exception):
    """Raised inside a job that was cancelled."""


class QueueFull(PlanError):
    """As many jobs wait as may."""


class QueueClosed(PlanError):
    """The queue takes no more jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """Snapshot of a job. `ahead`: jobs before it. `preview`: a small PIL image. `error`: a message for the user.

    `version` grows with every change.
    """

    state: JobState = "waiting"
    ahead: int = 0
    step: int = 0
    steps: int = 0
    note: str = ""
    preview: Any = None
    result: Any = None
    error: str = ""
    version: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("done", "failed", "cancelled")


class Job:
    """Work for the workers. `work` gets the job, to report progress, and returns the result.

    `outcome`: a future with the result, or the exception that the job ended with; Cancelled if it was cancelled.
    `takes`: its part of the queue's capacity while it runs.
    """

    def __init__(self, work: "Callable[[Job], Any]", takes: int = 1) -> None:
        self._work, self.takes = work, takes
        self._on_cancel: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._view = JobView()
        self._is_unwanted = False
        self._submitted = time.monotonic()
        self.queued_seconds = 0.0
        self.outcome: Future[Any] = Future()
        self.outcome.set_running_or_notify_cancel()  # only `cancel` of the job ends it early

    @property
    def view(self) -> JobView:
        """The current snapshot."""
        return self._view

    def show(self, **changes: Any) -> None:
        """Update fields of the view."""
        self._change(**changes)

    def check(self) -> None:
        """Raise Cancelled if the job was cancelled."""
        if self._is_unwanted:
            raise Cancelled

    def cancel(self) -> None:
        """Cancel: at once while it waits, at its next check while it runs."""
        self._is_unwanted = True
        if self._change(only="waiting", state="cancelled"):
            self.outcome.set_exception(Cancelled())
        for function in tuple(self._on_cancel):
            function()

    def when_cancelled(self, function: Callable[[], object]) -> None:
        """Call `function` in the thread that cancels the job, or now if it was cancelled before."""
        self._on_cancel.append(function)
        if self._is_unwanted:
            function()

    def run(self) -> None:
        """Do the work. The outcome is in the view, and in `outcome`."""
        if not self._change(only="waiting", state="running", ahead=0):
            return
        self.queued_seconds = time.monotonic() - self._submitted
        try:
            result = self._work(self)
        except Cancelled as error:
            self._end_with(error, state="cancelled")
        except Exception as error:
            if not isinstance(error, PatchparError):
                log.exception("a job failed")
            self._end_with(error, state="failed", error=job_error_message(error))
        else:
            if self._change(state="done", result=result, preview=None):
                self.outcome.set_result(result)

    def abandon(self) -> None:
        """End a job that was cancelled and goes on all the same: whoever waits for its outcome has it now."""
        self._end_with(Cancelled(), state="cancelled")

    def set_ahead(self, ahead: int) -> None:
        """Set the number of jobs before it."""
        if self._view.ahead != ahead:
            self._change(only="waiting", ahead=ahead)

    def _end_with(self, raised: Exception, **changes: Any) -> None:
        if self._change(**changes, preview=None):
            self.outcome.set_exception(raised.with_traceback(None))  # which would keep the tensors of its frames

    def _change(self, *, only: JobState | None = None, **changes: Any) -> bool:
        """Update the view of a job that is not over, `only` if it is in this state. Return whether it was updated."""
        with self._lock:
            if self._view.is_over or only not in (None, self._view.state):
                return False
            self._view = replace(self._view, **changes, version=self._view.version + 1)
            return True


def job_error_message(error: Exception) -> str:
    """Message for the user: the package's own errors as they are, others with their kind, without tracebacks.

    The traceback is in the server's terminal.
    """
    text = str(error) or "no message"
    first = text.split("\nTraceback", 1)[0].strip()
    if isinstance(error, (WorkerDied, WorkerHung)):
        return f"{first} The workers are started again with the next job: try once more."
    return first if isinstance(error, PatchparError) else f"{type(error).__name__}: {first}"


class WorkQueue:
    """Runs jobs in order, each as soon as there is room for it: the first one is never overtaken. `close` ends it.

    `capacity`: what jobs that run may take together, such as the number of workers; by default one runs at a time.
    """

    def __init__(self, *, max_waiting: int, capacity: int = 1) -> None:
        self._most, self._free, self._capacity = max_waiting, capacity, capacity
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._is_closed = False
        self._threads = capacity
        self._ended = threading.Event()  # a join that a signal interrupts takes the thread for ended in Python 3.11
        for _ in range(capacity):
            threading.Thread(target=self._serve, name="patchpar-jobs", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Number of jobs that wait."""
        with self._changed:
            return sum(not job.view.is_over for job in self._waiting)

    def append(self, work: Callable[[Job], Any], *, takes: int = 1) -> Job:
        """Append a job that takes so much of the capacity. Raises QueueClosed, and QueueFull if too many jobs wait."""
        with self._changed:
            self.check_open()
            self._waiting = deque(job for job in self._waiting if not job.view.is_over)
            if len(self._waiting) >= self._most:
                raise QueueFull(f"{len(self._waiting)} jobs are waiting, which is the limit: try later")
            job = Job(work, min(takes, self._capacity))
            job.when_cancelled(self._wake)
            self._waiting.append(job)
            self._update_positions()
            self._changed.notify_all()
            return job

    def check_open(self) -> None:
        """Raise QueueClosed if the queue takes no more jobs."""
        if self._is_closed:
            raise QueueClosed("the server is closing: start it again")

    def stop_taking(self) -> None:
        """Take no more jobs. Those that wait or run are still done. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        """Take no more jobs and wait for those that are there, up to `seconds`. Return whether all have ended."""
        self.stop_taking()
        return self._ended.wait(seconds)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Cancel everything, wait up to `timeout` seconds for running jobs, and abandon the others. Idempotent."""
        with self._changed:
            self.stop_taking()
            for job in (*self._waiting, *self._running):
                job.cancel()
        if not self.finish(timeout):
            with self._changed:
                for job in self._running:
                    job.abandon()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._running.remove(job)
                self._free += job.takes
                self._update_positions()
                self._changed.notify_all()
        with self._changed:
            self._threads -= 1
            if self._threads == 0:
                self._ended.set()

    def _next(self) -> Job | None:
        """Wait for a job that there is room for; None when the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_first_possible() or (self._is_closed and not self._waiting))
            if not self._waiting:
                return None
            job = self._waiting.popleft()
            self._running.append(job)
            self._free -= job.takes
            self._update_positions()
            return job

    def _is_first_possible(self) -> bool:
        """Whether there is room for the first job that waits. Needs the lock."""
        while self._waiting and self._waiting[0].view.is_over:
            self._waiting.popleft()
        return bool(self._waiting) and self._waiting[0].takes <= self._free

    def _wake(self) -> None:
        """Let threads look again: a job that waits may be gone."""
        with self._changed:
            self._changed.notify_all()

    def _update_positions(self) -> None:
        """Update `ahead` of waiting jobs. Needs the lock."""
        ahead = len(self._running)
        for job in self._waiting:
            job.set_ahead(ahead)
            ahead += not job.view.is_over
