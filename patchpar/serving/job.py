"""A job: work for the workers, which reports progress and events, and can be cancelled."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from patchpar.errors import PatchparError, WorkerDied, WorkerHung

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
log = logging.getLogger(__name__)


class Cancelled(Exception):
    """Raised inside a job that was cancelled."""


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
    `takes`: its part of the queue's capacity while it runs. `facts`: what a policy of the queue has to know of it.
    """

    def __init__(
        self, work: "Callable[[Job], Any]", takes: int = 1, *, facts: Any = None, is_urgent: bool = False
    ) -> None:
        self._work, self.takes, self.facts, self.is_urgent = work, takes, facts, is_urgent
        self._on_cancel: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._view = JobView()
        self._is_unwanted = False
        self.submitted = time.monotonic()
        self.queued_seconds = 0.0
        self._events: list[Any] = []
        self._listeners: list[Callable[[], object]] = []
        self.outcome: Future[Any] = Future()
        self.outcome.set_running_or_notify_cancel()  # only `cancel` of the job ends it early

    @property
    def view(self) -> JobView:
        """The current snapshot."""
        return self._view

    def show(self, **changes: Any) -> None:
        """Update fields of the view."""
        self._change(**changes)

    def send(self, event: Any) -> None:
        """Append an event, which all who read the job's events get."""
        with self._lock:
            self._events.append(event)
        self._notify()

    def events(self, start: int = 0) -> tuple[Any, ...]:
        """Return the events so far, from number `start` on."""
        with self._lock:
            return tuple(self._events[start:])

    @contextmanager
    def listening(self, function: Callable[[], object]) -> Iterator[None]:
        """Call `function` in the job's thread after each event and change of the view, and at the end."""
        self._listeners.append(function)
        self.outcome.add_done_callback(lambda _: self._notify())
        try:
            yield
        finally:
            self._listeners.remove(function)

    def _notify(self) -> None:
        for function in tuple(self._listeners):
            function()

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
        self.queued_seconds = time.monotonic() - self.submitted
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
        self._notify()
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
