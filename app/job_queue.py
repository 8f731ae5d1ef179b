"""The app's jobs by page: a page has one job at a time, and finds it again after a reload.

    page A --submit--> WorkQueue --> workers
    page A <--view---- jobs ahead, step, preview, result

Pages never block on workers: they read views. The job of a closed page is cancelled after a grace period. Gradio's own
queue cannot do this: see docs/decisions/0024-job-queue-beside-gradio.md.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from patchpar import PlanError
from patchpar.serving.job import Cancelled, Job, JobState, JobView, job_error_message
from patchpar.serving.job_queue import CLOSE_SECONDS, WorkQueue

__all__ = ["Cancelled", "Job", "JobQueue", "JobState", "JobView", "job_error_message"]

MAX_WAITING = 8  # jobs; a further one is refused at once instead of waiting for minutes
GRACE = 10.0  # seconds for a reloaded page to reconnect
MAX_PAGES = 16  # pages whose last results are kept; an image and its trace take some MB


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


class JobQueue(WorkQueue):
    """The only queue before the workers, or a view of that of a server. `close` ends it, or its own part of it."""

    def __init__(self, *, max_waiting: int = MAX_WAITING, grace: float = GRACE) -> None:
        self._grace = grace
        self._pages: OrderedDict[str, _PageJobs] = OrderedDict()
        self._append: Callable[[Callable[[Job], Any]], Job] = self.append
        super().__init__(max_waiting=max_waiting)

    @classmethod
    def sharing(cls, append: Callable[[Callable[[Job], Any]], Job]) -> "JobQueue":
        """Pages whose jobs wait in a server's queue. `append` puts one there; raises PlanError if it cannot."""
        found = cls()
        found._append = append
        return found

    def submit(self, owner: str, kind: str, work: Callable[[Job], Any]) -> Job:
        """Append a job. Raises PlanError if the queue is full, or the page's last job has not ended."""
        with self._changed:
            page = self._page(owner)
            self.check_open()
            if not page.is_idle:
                raise PlanError("this page already has a job: wait for it, or cancel it")
            page.last = page.job_queue[kind] = job = self._append(work)
            return job

    def job_of(self, owner: str, kind: str) -> Job | None:
        """The page's last job of this kind."""
        with self._changed:
            return self._page(owner).job_queue.get(kind)

    def kinds_of(self, owner: str) -> list[str]:
        """The kinds of jobs that the page has had."""
        with self._changed:
            return [*self._page(owner).job_queue]

    def forget(self, owner: str, kind: str) -> None:
        """The page's last job of this kind is of no interest any more."""
        with self._changed:
            self._page(owner).job_queue.pop(kind, None)

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
            if self._page(owner).leaving is threading.current_thread():  # it may have reconnected, and left, just now
                self.cancel(owner)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Cancel everything, and wait up to `timeout` seconds for the running job. Idempotent."""
        with self._changed:
            for page in self._pages.values():
                if page.leaving is not None:
                    page.leaving.cancel()
        super().close(timeout)

    def _page(self, owner: str) -> _PageJobs:
        page = self._pages.setdefault(owner, _PageJobs())
        self._pages.move_to_end(owner)
        idle = [name for name, other in self._pages.items() if other.is_idle]
        for name in idle[: max(0, len(self._pages) - MAX_PAGES)]:
            if name != owner:
                del self._pages[name]
        return page
