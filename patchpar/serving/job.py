"""A job: work for the workers, which reports progress and events, and can be cancelled."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from patchpar.errors import LaunchError, PatchparError, WorkerDied, WorkerError, WorkerHung

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
log = logging.getLogger(__name__)


class Cancelled(Exception):
    """Raised inside a job that was cancelled."""


class ServerEnding(Cancelled):
    """Raised for a job that the end of the server has cancelled, and nobody who wants it."""


class Suspended(Exception):
    """Raised inside a job that is to go on later. What it needs for that is in its `kept`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """Snapshot of a job. `ahead`: jobs before it. `preview`: a small PIL image. `error`: a message for the user.

    `seconds_left`: until its last step, by the steps so far; None if unknown.

    `version` grows with every change.
    """

    state: JobState = "waiting"
    ahead: int = 0
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None
    note: str = ""
    preview: Any = None
    result: Any = None
    error: str = ""
    version: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("done", "failed", "cancelled")


class Journaled(Cancelled):
    """Raised for a job that the next server goes on with, as `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Job:
    """Work for the workers. `work` gets the job, to report progress, and returns the result.

    `outcome`: a future with the result, or the exception that the job ended with; Cancelled if it was cancelled.
    `takes`: its part of the queue's capacity while it runs. `facts`: what a policy of the queue has to know of it.
    `source`: what it was made of. `kept`: of an earlier job that it goes on with.
    """

    def __init__(
        self,
        work: "Callable[[Job], Any]",
        takes: int = 1,
        *,
        facts: Any = None,
        is_urgent: bool = False,
        source: Any = None,
        kept: Any = None,
    ) -> None:
        self._work, self.takes, self.facts, self.is_urgent = work, takes, facts, is_urgent
        self._on_cancel: list[Callable[[], object]] = []
        self._on_suspend: list[Callable[[], object]] = []
        self.is_suspending, self.suspensions = False, int(kept is not None)
        self.source = source
        self.kept = kept
        """What the work keeps of itself, to go on with after it was suspended."""
        self.done_steps = 0
        self.peers: tuple[Job, ...] = ()
        """Jobs that this one makes the results of, in one call."""
        self._leader: Job | None = None
        self._takes_alone = self._wanted = takes
        self._lock = threading.Lock()
        self._view = JobView()
        self._is_unwanted = False
        self._reason = Cancelled()
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
        """Call `function` in the job's thread after each event and change of the view, and once it has its outcome."""
        self._listeners.append(function)
        try:
            yield
        finally:
            self._listeners.remove(function)

    def _notify(self) -> None:
        for function in tuple(self._listeners):
            function()

    def check(self) -> None:
        """Raise Cancelled if the job was cancelled, and Suspended if it is to go on later."""
        if self._is_unwanted:
            raise Cancelled
        if self.is_suspending:
            raise Suspended

    def cancel(self, reason: Cancelled | None = None) -> None:
        """Cancel: at once while it waits, at its next check while it runs. The first reason is that of its outcome."""
        if not self._is_unwanted:
            self._is_unwanted, self._reason = True, reason or self._reason
        if self._change(only="waiting", state="cancelled"):
            self._raise_in_outcome(self._reason)
        (self._leader or self)._end_unwanted()

    def _end_unwanted(self) -> None:
        """Let the work end, if none of those who share it wants it."""
        if self._is_wanted_by_none:
            for function in tuple(self._on_cancel):
                function()

    @property
    def _is_wanted_by_none(self) -> bool:
        return all(each._is_unwanted for each in (self, *self.peers))

    def suspend(self) -> None:
        """Let it wait again, at its next check. Its work goes on from what it has kept when it is run again."""
        self.is_suspending = True
        for function in tuple(self._on_suspend):
            function()

    def when_cancelled(self, function: Callable[[], object]) -> None:
        """Call `function` in the thread that cancels the job, or now if it was cancelled before."""
        self._on_cancel.append(function)
        if self._is_wanted_by_none:
            function()

    @contextmanager
    def during(self, *, cancel: Callable[[], object], suspend: Callable[[], object]) -> Iterator[None]:
        """Until the block ends, call these in the thread that cancels or suspends the job, or now if that was before.

        What they belong to, such as a call of the pipeline with its output, is not kept afterwards.
        """
        self._on_suspend.append(suspend)
        try:
            self.when_cancelled(cancel)
            if self.is_suspending:
                suspend()
            yield
        finally:
            self._on_cancel.remove(cancel)
            self._on_suspend.remove(suspend)

    def run(self) -> None:
        """Do the work. The outcome is in the view, and in `outcome`."""
        if not self._begin():
            return
        try:
            result = self._work(self)
        except Suspended:
            self._wait_again()
        except BaseException as error:  # noqa: BLE001  whatever it is, whoever waits for the outcome gets it
            self.fail(error if isinstance(error, Exception) else _raised_exit(error))
        else:
            self.finish(result)

    def fit(self, capacity: int) -> None:
        """Take no more than there is, or as much as it was to take."""
        self.takes = self._takes_alone = min(self._wanted, capacity)

    def join(self, leader: "Job") -> None:
        """Wait for the result that another job makes, without taking anything of the capacity."""
        self._leader, self._takes_alone, self.takes = leader, self.takes, 0
        self._begin()

    def part(self) -> None:
        """Wait again, alone, unless the job that it has joined has made its result."""
        self._leader, self.takes = None, self._takes_alone
        if not self._view.is_over:
            self._wait_again()

    def finish(self, result: Any) -> None:
        """Take the result that another job has made."""
        if self._change(state="done", result=result, preview=None):
            self.outcome.set_result(result)
            self._notify()

    def _begin(self) -> bool:
        if not self._change(only="waiting", state="running", ahead=0):
            return False
        if not self.suspensions:
            self.queued_seconds = time.monotonic() - self.submitted
        return True

    def fail(self, error: Exception) -> None:
        """End with an exception, its own or that of the job which it has joined."""
        if isinstance(error, Cancelled):
            self._end_with(self._reason, state="cancelled")
            return
        is_of_server = self.is_urgent and isinstance(error, (WorkerError, LaunchError))  # nobody else hears of it
        if is_of_server or not isinstance(error, PatchparError):
            log.error("a job failed", exc_info=error)
        self._end_with(error, state="failed", error=job_error_message(error))

    def _wait_again(self) -> None:
        self.is_suspending, self.suspensions = False, self.suspensions + 1
        self._change(state="waiting", note="suspended")
        if self._is_unwanted:  # also if it was cancelled just before it waited, which ended nothing
            self._end_with(self._reason, state="cancelled")

    def forget_suspension(self) -> None:
        """Let it run on when it is run again, also if it was suspended once more when it waited already."""
        self.is_suspending = False

    def abandon(self, reason: Cancelled | None = None) -> None:
        """End a job that was cancelled and goes on all the same: whoever waits for its outcome has it now."""
        self._end_with(reason or self._reason, state="cancelled")

    def set_ahead(self, ahead: int) -> None:
        """Set the number of jobs before it."""
        if self._view.ahead != ahead:
            self._change(only="waiting", ahead=ahead)

    def _end_with(self, raised: Exception, **changes: Any) -> None:
        if self._change(**changes, preview=None):
            self._raise_in_outcome(raised.with_traceback(None))  # which would keep the tensors of its frames

    def _raise_in_outcome(self, error: Exception) -> None:
        self.outcome.set_exception(error)
        self._notify()

    def _change(self, *, only: JobState | None = None, **changes: Any) -> bool:
        """Update the view of a job that is not over, `only` if it is in this state. Return whether it was updated."""
        with self._lock:
            if self._view.is_over or only not in (None, self._view.state):
                return False
            self._view = replace(self._view, **changes, version=self._view.version + 1)
        self._notify()
        return True


def _raised_exit(error: BaseException) -> RuntimeError:
    """Return an error in the place of one that would end whoever waits for the job, such as SystemExit of a model."""
    return RuntimeError(f"{type(error).__name__}: {error}")


def job_error_message(error: Exception) -> str:
    """Message for the user: the package's own errors as they are, others with their kind, without tracebacks.

    The traceback is in the server's terminal.
    """
    text = str(error) or "no message"
    first = text.split("\nTraceback", 1)[0].strip()
    if isinstance(error, (WorkerDied, WorkerHung)):
        return f"{first} The workers are started again with the next job: try once more."
    return first if isinstance(error, PatchparError) else f"{type(error).__name__}: {first}"
