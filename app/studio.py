"""Everything behind the page: one desk, one set of workers, and who is there."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from .drawing import ImageJobRunner
from .jobs import JobQueue
from .live import Feeds
from .visits import PageSessions
from .workers import AppConfig, AppWorkers

HOUR = 3600.0  # seconds that a page's files are kept


def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="patchpar-app-", ignore_cleanup_errors=True)  # a job may still write into it


@dataclass(frozen=True, slots=True)
class AppState:
    """What every tab is given. `scratch`: files to and from pages, for nobody else to read. `close` ends it all."""

    workers: AppWorkers
    artist: ImageJobRunner
    desk: JobQueue
    visits: PageSessions
    feeds: Feeds
    scratch: TemporaryDirectory[str] = field(default_factory=_scratch)

    @classmethod
    def open(cls, setup: AppConfig) -> "AppState":
        """Nothing is started before a job needs it; the first is to get ready."""
        workers, desk = AppWorkers(setup), JobQueue()
        studio = cls(workers, ImageJobRunner(workers), desk, PageSessions(desk), Feeds())
        desk.submit("", "prepare", studio.artist.prepare)
        return studio

    def folder_of(self, owner: str) -> Path:
        """Where a page's files are put. Those of any page that are older than an hour are deleted."""
        pages = self._folder("pages")
        for old in pages.glob("*/*"):
            if time.time() - old.stat().st_mtime > HOUR:
                old.unlink(missing_ok=True)
        folder = pages / owner
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def uploads(self) -> Path:
        """Where Gradio puts what people upload, and previews and results; it deletes them after an hour."""
        return self._folder("uploads")

    def _folder(self, name: str) -> Path:
        folder = Path(self.scratch.name) / name
        folder.mkdir(exist_ok=True)
        return folder

    def close(self) -> None:
        """End jobs and workers. Idempotent."""
        self.feeds.close()
        self.desk.close()
        self.workers.close()  # which ends the job that has not ended by itself
        self.desk.close()
        self.scratch.cleanup()
