"""Results that a server has when it ends, in its journal, for clients who fetch them from the next one.

FOLDER/ID/result.json           the request, its owner, and what clients get of it
FOLDER/ID/ID.mp4, ID.webp       files of a video
"""

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.serving.kept_jobs import KeptJob
from patchpar.serving.request_journal import JournalEntry, RequestJournal, read_entry
from patchpar.serving.video_files import StoredVideo

RESULT = "result.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedResult(JournalEntry):
    """A result. `result`: JSON of an image's response, or of a video's figures. `completed_at`: Unix time in seconds.

    `folder`: where it is, with the files of a video.
    """

    steps: int
    completed_at: int
    result: dict[str, Any]
    folder: Path


def save_results(journal: RequestJournal, jobs: Sequence[KeptJob], model: str) -> None:
    """Write down results for the next server. What cannot be written is lost, and the log says so."""
    for kept in jobs:
        try:
            with journal.writing(kept.id) as part:
                video = kept.result if isinstance(kept.result, StoredVideo) else None
                for file in () if video is None else (video.file, video.thumbnail):
                    shutil.copy2(file, part)
                own = {
                    "steps": kept.job.view.steps,
                    "completed_at": kept.completed_at,
                    "result": kept.result if video is None else video.facts,
                }
                (part / RESULT).write_text(json.dumps({**_entry_of(kept, model).facts, **own}), encoding="utf-8")
        except Exception:
            log.exception("the result of %s could not be written to the journal", kept.id)


def saved_results(journal: RequestJournal, model: str) -> Iterator[FinishedResult]:
    """Yield the results, the oldest first. What cannot be read stays where it is, and the log says why.

    Raises PlanError for a result of another model than `model`.
    """
    yield from sorted(journal.read(RESULT, _read, model), key=lambda each: (each.completed_at, each.id))


def _entry_of(kept: KeptJob, model: str) -> JournalEntry:
    return JournalEntry(
        id=kept.id,
        model=model,
        route=kept.work.route,
        request=kept.work.request.model_dump(mode="json", exclude_none=True),
        seed=kept.call.seed,
        owner=kept.work.owner,
        created_at=kept.created_at,
        key=kept.key,
        digest=kept.digest.hex(),
    )


def _read(path: Path) -> FinishedResult:
    """Return the result of a folder. Raises PlanError, OSError, KeyError, TypeError and ValueError."""
    facts, entry = read_entry(path / RESULT)
    steps, completed_at = int(facts["steps"]), int(facts["completed_at"])
    return FinishedResult(**entry, steps=steps, completed_at=completed_at, result=dict(facts["result"]), folder=path)
