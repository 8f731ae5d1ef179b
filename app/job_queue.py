"""The queue before the workers: one job at a time, observed and cancelled by the page that submitted it.

    page A --submit--> [ A | B | C ] --one thread--> workers
    page A <--view---- jobs ahead, step, preview, result

Pages never block on workers: they read views. A reloaded page finds its job again; the job of a closed page is
cancelled after a grace period. Gradio's own queue cannot do this: see docs/decisions/0024-job-queue-beside-gradio.md.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from patchpar import PatchparError, PlanError, WorkerDied, WorkerHung

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
MAX_WAITING = 8  # jobs; a further one is refused at once instead of waiting for minutes
GRACE = 10.0  # seconds for a reloaded page to reconnect
CLOSE_SECONDS = 3.0  # a first call may be minutes from its next step, and `docker stop` waits for ten seconds
MAX_PAGES = 16  # pages whose last results are kept; an image and its trace take some MB
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
    """Work for the workers. `work` gets the job, to report progress, and returns the result."""

    def __init__(self, work: "Callable[[Job], Any]") -> None:
        self._work = work
        self._lock = threading.Lock()
        self._view = JobView()
        self._is_unwanted = False

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
        if self._view.state == "waiting":
            self._change(state="cancelled")

    def run(self) -> None:
        """Do the work. The outcome is in the view."""
        if self._view.is_over:
            return
        self._change(state="running", ahead=0)
        try:
            result = self._work(self)
        except Cancelled:
            self._change(state="cancelled", preview=None)
        except Exception as error:
            if not isinstance(error, PatchparError):
                log.exception("a job failed")
            self._change(state="failed", error=job_error_message(error), preview=None)
        else:
            self._change(state="done", result=result, preview=None)

    def set_ahead(self, ahead: int) -> None:
        """Set the number of jobs before it."""
        if self._view.state == "waiting" and self._view.ahead != ahead:
            self._change(ahead=ahead)

    def _change(self, **changes: Any) -> None:
        with self._lock:
            if not self._view.is_over:
                self._view = replace(self._view, **changes, version=self._view.version + 1)


def job_error_message(error: Exception) -> str:
    """Message for the page: the package's own errors as they are, others with their kind, without tracebacks.

    The traceback is in the server's terminal.
    """
    text = str(error) or "no message"
    first = text.split("\nTraceback", 1)[0].strip()
    if isinstance(error, (WorkerDied, WorkerHung)):
        return f"{first} The workers are started again with the next job: try once more."
    return first if isinstance(error, PatchparError) else f"{type(error).__name__}: {first}"


@dataclass(slots=True)
class _PageJobs:
    """Jobs and values of one page. `leaving`: cancels its job if the page does not reconnect."""

    job_queue: dict[str, Job] = field(default_factory=dict)
    last: Job | None = None
    leaving: threading.Timer | None = None
    stored: dict[str, Any] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether no job of the page waits or runs."""
        return self.last is None or self.last.view.is_over


class JobQueue:
    """The only queue before the workers. `close` ends it."""

    def __init__(self, *, max_waiting: int = MAX_WAITING, grace: float = GRACE) -> None:
        self._most, self._grace = max_waiting, grace
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._pages: OrderedDict[str, _PageJobs] = OrderedDict()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="patchpar-jobs", daemon=True)
        self._thread.start()

    def submit(self, owner: str, kind: str, work: Callable[[Job], Any]) -> Job:
        """Append a job. Raises PlanError if the queue is full, or the page's last job has not ended."""
        with self._changed:
            page = self._page(owner)
            if self._is_closed:
                raise PlanError("the server is closing: start it again")
            if not page.is_idle:
                raise PlanError("this page already has a job: wait for it, or cancel it")
            self._waiting = deque(job for job in self._waiting if not job.view.is_over)
            if len(self._waiting) >= self._most:
                raise PlanError(f"{len(self._waiting)} jobs are waiting, which is the limit: try later")
            page.last = page.job_queue[kind] = job = Job(work)
            self._waiting.append(job)
            self._update_positions()
            self._changed.notify_all()
            return job

    def job_of(self, owner: str, kind: str) -> Job | None:
        """The page's last job of this kind."""
        with self._changed:
            return self._page(owner).job_queue.get(kind)

    def store(self, owner: str, name: str, value: Any) -> None:
        """Store a value for a page; the least recent pages are dropped beyond MAX_PAGES."""
        with self._changed:
            self._page(owner).stored[name] = value

    def stored(self, owner: str, name: str) -> Any:
        """The stored value, or None."""
        with self._changed:
            return self._page(owner).stored.get(name)

    def cancel(self, owner: str) -> None:
        """Cancel the page's job, if it has not ended."""
        with self._changed:
            page = self._page(owner)
            page.leaving = None
            if page.last is not None:
                page.last.cancel()
            self._update_positions()

    def page_left(self, owner: str) -> None:
        """The page disconnected, perhaps for a reload: cancel its job after the grace period."""
        with self._changed:
            page = self._page(owner)
            if not page.is_idle and page.leaving is None:
                page.leaving = threading.Timer(self._grace, self._give_up, [owner])
                page.leaving.daemon = True
                page.leaving.start()

    def page_returned(self, owner: str) -> None:
        """The page reconnected: keep its job."""
        with self._changed:
            page = self._page(owner)
            if page.leaving is not None:
                page.leaving.cancel()
                page.leaving = None

    def _give_up(self, owner: str) -> None:
        """Cancel the job of a page that has not reconnected."""
        with self._changed:
            if self._page(owner).leaving is not None:  # it may have reconnected just now
                self.cancel(owner)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Cancel everything, and wait up to `timeout` seconds for the running job. Idempotent."""
        with self._changed:
            self._is_closed = True
            for job in (*self._waiting, *filter(None, [self._running])):
                job.cancel()
            for page in self._pages.values():
                if page.leaving is not None:
                    page.leaving.cancel()
            self._changed.notify_all()
        self._thread.join(timeout)

    def _page(self, owner: str) -> _PageJobs:
        page = self._pages.setdefault(owner, _PageJobs())
        self._pages.move_to_end(owner)
        idle = [name for name, other in self._pages.items() if other.is_idle]
        for name in idle[: max(0, len(self._pages) - MAX_PAGES)]:
            if name != owner:
                del self._pages[name]
        return page

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
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
