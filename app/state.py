"""State behind the page: one job queue, one set of workers, the page sessions."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from patchpar.models.files import path_of

from .feeds import Feeds
from .image_history import ImageHistory
from .image_parameters import add_parameters
from .image_runner import ImageJobRunner, JobImage
from .job_queue import JobQueue
from .requests import GenerateRequest
from .sessions import PageSessions
from .workers import AppConfig, AppWorkers

PREPARE = "prepare"  # kind of the first job, which belongs to no page
HOUR = 3600.0  # seconds that a page's files are kept


def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="patchpar-app-", ignore_cleanup_errors=True)  # a job may still be writing


@dataclass(frozen=True, slots=True)
class AppState:
    """Shared by all tabs. `scratch`: files of pages, readable by this user only. `close` ends everything."""

    workers: AppWorkers
    image_runner: ImageJobRunner
    job_queue: JobQueue
    sessions: PageSessions
    feeds: Feeds
    scratch: TemporaryDirectory[str] = field(default_factory=_scratch)

    @classmethod
    def open(cls, setup: AppConfig) -> "AppState":
        """Workers are started by the first job, which prepares them."""
        state = cls.sharing(AppWorkers(setup), JobQueue())
        state.prepare()
        return state

    @classmethod
    def sharing(cls, workers: AppWorkers, job_queue: JobQueue) -> "AppState":
        """State of a page on the queue and the workers of a server; `prepare` is for when its model is loaded."""
        return cls(workers, ImageJobRunner(workers), job_queue, PageSessions(job_queue), Feeds())

    def prepare(self) -> None:
        """Generate once, so that the first real image is as fast as later ones."""
        self.job_queue.submit("", PREPARE, self.image_runner.prepare)

    def folder_of(self, owner: str) -> Path:
        """Folder of a page's files. Files of any page older than an hour are deleted."""
        pages = self._folder("pages")
        for old in pages.glob("*/*"):
            with suppress(FileNotFoundError):  # another page may have deleted it just now
                if time.time() - old.stat().st_mtime > HOUR:
                    old.unlink()
        folder = pages / owner
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def history(self) -> ImageHistory:
        """Images that pages have generated; they stay as long as the server, within its limits."""
        return ImageHistory(self._folder("history"))

    def keep(
        self,
        owner: str,
        request: GenerateRequest,
        image: JobImage,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add an image to its page's history, with its parameters. A folder goes by its name, not by its path.

        `more`: further parameters, by name. Raises PatchparError where the disk takes no more.
        """
        model = self.workers.setup.model
        known = path_of(model).name if path_of(model).is_dir() else model
        facts = {**more, "Model": known, "Plan": str(image.run.plan), "Version": "patchpar"}
        self.history.add(owner, add_parameters(image.image, request, facts))

    def kinds_of(self, owner: str) -> list[str]:
        """The kinds of jobs that a page gets back when it is reloaded; its history comes back like an image."""
        images = ["image"] if self.history.names(owner) else []
        return [*images, *self.job_queue.kinds_of(owner)]

    @property
    def uploads(self) -> Path:
        """Gradio's folder of uploads, previews and results; Gradio deletes them after an hour."""
        return self._folder("uploads")

    def _folder(self, name: str) -> Path:
        folder = Path(self.scratch.name) / name
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def is_computing(self) -> bool:
        """Whether a job still runs after `close`: on a device in this process, where a call cannot be ended."""
        return not self.job_queue.finish(0)

    def close(self) -> None:
        """End jobs and workers, and delete all files. Idempotent."""
        self.feeds.close()
        self.job_queue.close()
        self.workers.close()  # ends a job that is still running
        self.job_queue.close()
        self.scratch.cleanup()
