"""Results that a server has when it ends, in its journal, for clients who fetch them from the next one.

FOLDER/ID/result.json           the request, its owner, and what clients get of it
FOLDER/ID/ID.mp4, ID.webp       files of a video
"""

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchpar.plan.json_files import read_object
from patchpar.serving.kept_jobs import KeptJob
from patchpar.serving.request_journal import RequestJournal
from patchpar.serving.video_files import StoredVideo

FORMAT = 1
RESULT = "result.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedResult:
    """A result. `result`: JSON of an image's response, or of a video's figures. Other fields: see JournaledRequest.

    `folder`: where it was read from, with the files of a video; None for one that is to be written.
    """

    id: str
    model: str
    route: str
    request: dict[str, Any]
    seed: int
    steps: int
    owner: str
    created_at: int
    completed_at: int
    key: str
    digest: str
    result: dict[str, Any]
    folder: Path | None = None


def save_results(journal: RequestJournal, jobs: Sequence[KeptJob], model: str) -> None:
    """Write down results for the next server. What cannot be written is lost, and the log says so."""
    for kept in jobs:
        try:
            with journal.writing(kept.id) as part:
                video = kept.result if isinstance(kept.result, StoredVideo) else None
                for file in () if video is None else (video.file, video.thumbnail):
                    shutil.copy2(file, part)
                facts = asdict(_of(kept, model))
                del facts["folder"]
                (part / RESULT).write_text(json.dumps({"format": FORMAT, **facts}), encoding="utf-8")
        except Exception:
            log.exception("the result of %s could not be written to the journal", kept.id)


def saved_results(journal: RequestJournal, model: str) -> Iterator[FinishedResult]:
    """Yield the results, the oldest first. What cannot be read stays where it is, and the log says why.

    Raises PlanError for a result of another model than `model`.
    """
    yield from sorted(journal.read(RESULT, _read, model), key=lambda each: (each.completed_at, each.id))


def _of(kept: KeptJob, model: str) -> FinishedResult:
    is_video = isinstance(kept.result, StoredVideo)
    assert kept.completed_at is not None
    return FinishedResult(
        id=kept.id,
        model=model,
        route=kept.work.route,
        request=kept.work.request.model_dump(mode="json", exclude_none=True),
        seed=kept.call.seed,
        steps=kept.job.view.steps,
        owner=kept.work.owner,
        created_at=kept.created_at,
        completed_at=kept.completed_at,
        key=kept.key,
        digest=kept.digest.hex(),
        result=kept.result.facts if is_video else kept.result,
    )


def _read(path: Path) -> FinishedResult:
    """Return the result of a folder. Raises PlanError, OSError, KeyError, TypeError and ValueError."""
    facts = read_object(path / RESULT)
    if facts["format"] != FORMAT or facts["id"] != path.name:
        raise ValueError(f"it has format {facts['format']!r} and is {facts['id']!r}")
    bytes.fromhex(facts["digest"])
    return FinishedResult(
        id=path.name,
        model=str(facts["model"]),
        route=str(facts["route"]),
        request=dict(facts["request"]),
        seed=int(facts["seed"]),
        steps=int(facts["steps"]),
        owner=str(facts["owner"]),
        created_at=int(facts["created_at"]),
        completed_at=int(facts["completed_at"]),
        key=str(facts["key"]),
        digest=str(facts["digest"]),
        result=dict(facts["result"]),
        folder=path,
    )
