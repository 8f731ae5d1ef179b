"""Everything behind the page: one desk, one set of workers, and who is there."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from .drawing import Artist
from .jobs import Desk
from .live import Feeds
from .visits import Visits
from .workers import Setup, Workers

HOUR = 3600.0  # seconds that a page's files are kept


def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="patchpar-app-")


@dataclass(frozen=True, slots=True)
class Studio:
    """What every tab is given. `scratch`: for files on their way to a page. `close` ends jobs and workers."""

    workers: Workers
    artist: Artist
    desk: Desk
    visits: Visits
    feeds: Feeds
    scratch: TemporaryDirectory[str] = field(default_factory=_scratch)

    @classmethod
    def open(cls, setup: Setup) -> "Studio":
        """Nothing is started before a job needs it; the first is to get ready."""
        workers, desk = Workers(setup), Desk()
        studio = cls(workers, Artist(workers), desk, Visits(desk), Feeds())
        desk.submit("", "prepare", studio.artist.prepare)
        return studio

    def folder_of(self, owner: str) -> Path:
        """Where a page's files are put. Those of any page that are older than an hour are deleted."""
        scratch = Path(self.scratch.name)
        for old in scratch.glob("*/*"):
            if time.time() - old.stat().st_mtime > HOUR:
                old.unlink()
        folder = scratch / owner
        folder.mkdir(exist_ok=True)
        return folder

    def close(self) -> None:
        """End jobs and workers. Idempotent."""
        self.feeds.close()
        self.desk.close()
        self.workers.close()
        self.scratch.cleanup()
