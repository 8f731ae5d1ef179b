"""Jobs before the workers: one at a time, in order, observed and cancelled from other threads.

    handler --submit--> [ A | B | C ] --one thread--> workers
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
CLOSE_SECONDS = 3.0  # a first call may be minutes from its next step, and `docker stop` waits for ten seconds
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
    """

    def __init__(self, work: "Callable[[Job], Any]") -> None:
        self._work = work
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

    def run(self) -> None:
        """Do the work. The outcome is in the view, and in `outcome`."""
        if not self._change(only="waiting", state="running", ahead=0):
            return
        self.queued_seconds = time.monotonic() - self._submitted
        try:
            result = self._work(self)
        except Cancelled as error:
            self._change(state="cancelled", preview=None)
            self._end_with(error)
        except Exception as error:
            if not isinstance(error, PatchparError):
                log.exception("a job failed")
            self._change(state="failed", error=job_error_message(error), preview=None)
            self._end_with(error)
        else:
            self._change(state="done", result=result, preview=None)
            self.outcome.set_result(result)

    def set_ahead(self, ahead: int) -> None:
        """Set the number of jobs before it."""
        if self._view.ahead != ahead:
            self._change(only="waiting", ahead=ahead)

    def _end_with(self, error: Exception) -> None:
        self.outcome.set_exception(error.with_traceback(None))  # which would keep the tensors of its frames

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


class SerialQueue:
    """Runs jobs one after another in a thread. `close` ends it."""

    def __init__(self, *, max_waiting: int) -> None:
        self._most = max_waiting
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._is_closed = False
        self._ended = threading.Event()  # a join that a signal interrupts takes the thread for ended in Python 3.11
        threading.Thread(target=self._serve, name="patchpar-jobs", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Number of jobs that wait."""
        with self._changed:
            return sum(not job.view.is_over for job in self._waiting)

    def append(self, work: Callable[[Job], Any]) -> Job:
        """Append a job. Raises QueueClosed, and QueueFull if too many jobs wait."""
        with self._changed:
            self.check_open()
            self._waiting = deque(job for job in self._waiting if not job.view.is_over)
            if len(self._waiting) >= self._most:
                raise QueueFull(f"{len(self._waiting)} jobs are waiting, which is the limit: try later")
            job = Job(work)
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
        """Cancel everything, and wait up to `timeout` seconds for the running job. Idempotent."""
        with self._changed:
            self.stop_taking()
            for job in (*self._waiting, *filter(None, [self._running])):
                job.cancel()
        self.finish(timeout)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    self._ended.set()
                    return
                self._running = self._waiting.popleft()
                self._update_positions()
            self._running.run()
            with self._changed:
                self._running = None
                self._update_positions()

    def _update_positions(self) -> None:
        """Update `ahead` of waiting jobs. Needs the lock."""
        ahead = int(self._running is not None)
        for job in self._waiting:
            job.set_ahead(ahead)
            ahead += not job.view.is_over
