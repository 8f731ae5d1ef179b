"""Who uses the workers: one job after another, each watched and cancelled by the page that asked for it.

    page A --submit--> [ A | B | C ] --one thread--> workers
    page A <--view---- how many are ahead, step, preview, result

Pages never wait for workers: they look at views. A page that is reloaded finds its job again; a page that is gone
leaves nothing behind, because its job is cancelled when it has not come back for a moment.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from patchpar import PatchparError, PlanError, WorkerDied, WorkerHung

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
MOST_WAITING = 8  # jobs; who comes later is told so at once, instead of waiting for minutes
GRACE = 10.0  # seconds in which a page that was reloaded comes back
CLOSE_SECONDS = 3.0  # a first call may be minutes from its next step, and `docker stop` waits for ten seconds
KEPT = 16  # pages whose last result is remembered; a picture and its trace are some MB
log = logging.getLogger(__name__)


class Cancelled(Exception):
    """Raised inside a job that its page has cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as it is now. `ahead`: jobs before it. `preview`: a small PIL picture. `error`: a sentence for the person.

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
        """Whether nothing more will happen."""
        return self.state in ("done", "failed", "cancelled")


class Job:
    """One piece of work for the workers. `work` gets the job, to show how far it is, and returns the result."""

    def __init__(self, work: "Callable[[Job], Any]") -> None:
        self._work = work
        self._lock = threading.Lock()
        self._view = JobView()
        self._is_unwanted = False

    @property
    def view(self) -> JobView:
        """How it stands."""
        return self._view

    def show(self, **changes: Any) -> None:
        """Fields of the view that have changed."""
        self._change(**changes)

    def check(self) -> None:
        """Raise Cancelled where nobody wants the result any more."""
        if self._is_unwanted:
            raise Cancelled

    def cancel(self) -> None:
        """End it: at once if it waits, at its next check if it runs."""
        self._is_unwanted = True
        if self._view.state == "waiting":
            self._change(state="cancelled")

    def run(self) -> None:
        """Do the work. Whatever happens becomes the view."""
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
            self._change(state="failed", error=sentence_of(error), preview=None)
        else:
            self._change(state="done", result=result, preview=None)

    def stand(self, ahead: int) -> None:
        """So many jobs are before it."""
        if self._view.state == "waiting" and self._view.ahead != ahead:
            self._change(ahead=ahead)

    def _change(self, **changes: Any) -> None:
        with self._lock:
            if not self._view.is_over:
                self._view = replace(self._view, **changes, version=self._view.version + 1)


def sentence_of(error: Exception) -> str:
    """An error for the page: the package's own as they are, others with their kind; a worker's traceback is left out.

    The traceback is in the terminal of the server.
    """
    text = str(error) or "no message"
    first = text.split("\nTraceback", 1)[0].strip()
    if isinstance(error, (WorkerDied, WorkerHung)):
        return f"{first} The workers are started again with the next job: try once more."
    return first if isinstance(error, PatchparError) else f"{type(error).__name__}: {first}"


@dataclass(slots=True)
class _PageJobs:
    """What is known of one page: its last job of each kind, and what cancels the last if the page stays away."""

    jobs: dict[str, Job] = field(default_factory=dict)
    last: Job | None = None
    leaving: threading.Timer | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self.last is None or self.last.view.is_over


class JobQueue:
    """The one queue before the workers. `close` ends it."""

    def __init__(self, *, most_waiting: int = MOST_WAITING, grace: float = GRACE) -> None:
        self._most, self._grace = most_waiting, grace
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._pages: OrderedDict[str, _PageJobs] = OrderedDict()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="patchpar-desk", daemon=True)
        self._thread.start()

    def submit(self, owner: str, kind: str, work: Callable[[Job], Any]) -> Job:
        """A new job at the end of the queue. Raises PlanError if there is no room, or the page has one under way."""
        with self._changed:
            page = self._page(owner)
            if self._is_closed:
                raise PlanError("the server is closing: start it again")
            if not page.is_idle:
                raise PlanError("this page has a job under way: wait for it, or cancel it")
            self._waiting = deque(job for job in self._waiting if not job.view.is_over)
            if len(self._waiting) >= self._most:
                raise PlanError(f"{len(self._waiting)} jobs are waiting, which is all there is room for: try later")
            page.last = page.jobs[kind] = job = Job(work)
            self._waiting.append(job)
            self._count()
            self._changed.notify_all()
            return job

    def job_of(self, owner: str, kind: str) -> Job | None:
        """The last job of this kind that a page had."""
        with self._changed:
            return self._page(owner).jobs.get(kind)

    def keep(self, owner: str, name: str, value: Any) -> None:
        """Remember something for a page, until pages that came later take its place."""
        with self._changed:
            self._page(owner).kept[name] = value

    def kept(self, owner: str, name: str) -> Any:
        """What was remembered, or None."""
        with self._changed:
            return self._page(owner).kept.get(name)

    def cancel(self, owner: str) -> None:
        """Cancel the page's job, if it has one under way."""
        with self._changed:
            page = self._page(owner)
            page.leaving = None
            if page.last is not None:
                page.last.cancel()
            self._count()

    def left(self, owner: str) -> None:
        """The page is gone; perhaps it is only being reloaded."""
        with self._changed:
            page = self._page(owner)
            if not page.is_idle and page.leaving is None:
                page.leaving = threading.Timer(self._grace, self._give_up, [owner])
                page.leaving.daemon = True
                page.leaving.start()

    def back(self, owner: str) -> None:
        """The page is here again."""
        with self._changed:
            page = self._page(owner)
            if page.leaving is not None:
                page.leaving.cancel()
                page.leaving = None

    def _give_up(self, owner: str) -> None:
        """Cancel the job of a page that has not come back."""
        with self._changed:
            if self._page(owner).leaving is not None:  # it may have come back in this very moment
                self.cancel(owner)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Cancel everything, and wait a little for the job that runs: it ends with its step. Idempotent."""
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
        for name in idle[: max(0, len(self._pages) - KEPT)]:
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
                self._count()
            self._running.run()
            with self._changed:
                self._running = None
                self._count()

    def _count(self) -> None:
        """Tell those who wait how many are ahead. Under the lock."""
        ahead = int(self._running is not None)
        for job in self._waiting:
            job.stand(ahead)
            ahead += not job.view.is_over
