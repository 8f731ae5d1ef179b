"""Requests whose results are fetched later: as they come, and as the last server has left them in its journal."""

import json
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from patchpar.serving.finished_results import FinishedResult, saved_results
from patchpar.serving.generated import GeneratedVideo
from patchpar.serving.image_call import NO_UPLOADS, ImageCall
from patchpar.serving.image_request import EditRequest, GenerationRequest
from patchpar.serving.image_response import response_of
from patchpar.serving.job import Job, Journaled
from patchpar.serving.kept_jobs import KeptJob, KeptWork, ended_job
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.request_error import RequestError
from patchpar.serving.request_journal import JournaledRequest
from patchpar.serving.service import ImageService
from patchpar.serving.uploaded_image import Uploads
from patchpar.serving.video_call import frame_rate_of
from patchpar.serving.video_files import StoredVideo
from patchpar.serving.video_request import VideoRequest

REQUESTS: dict[str, type[PipelineFields]] = {
    "generation": GenerationRequest,
    "edit": EditRequest,
    "video": VideoRequest,
}
"""By route."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterRequest:
    """A request whose result is kept. `key` and `digest`: see KeptJobs.add. `entry`: what the journal has of it.

    `is_awaited`: see KeptWork.
    """

    route: str
    wanted: Any
    owner: str
    uploads: Uploads = NO_UPLOADS
    key: str = ""
    digest: bytes = b""
    entry: JournaledRequest | None = None
    is_awaited: bool = False


def keep(service: ImageService, later: LaterRequest) -> KeptJob:
    """Queue a request, and keep what comes of it. Raises RequestError."""

    def submit() -> Job:
        kept = None if later.entry is None else later.entry.kept
        return service.submit(later.wanted, later.uploads, route=later.route, owner=later.owner, kept=kept)

    work = KeptWork(
        owner=later.owner,
        request=later.wanted,
        finish=partial(_result, service),
        drop=partial(_dropped, service),
        size=_bytes_of,
        route=later.route,
        ended=partial(_ended, service),
        is_awaited=later.is_awaited,
    )
    entry = later.entry
    name, created_at = ("", None) if entry is None else (entry.id, entry.created_at)
    return service.kept.add(work, submit, key=later.key, digest=later.digest, name=name, created_at=created_at)


def take_up(service: ImageService) -> int:
    """Queue the requests of the journal, and keep its results, under the same IDs; return how many requests these are.

    What this server refuses, by its limits for example, stays where it is, and the log says why. Raises PlanError for
    a request of another model.
    """
    journal, count = service.journal, 0
    if journal is None:
        return 0
    for result in saved_results(journal, service.name):
        try:
            service.kept.restore(_finished(service, result))
        except (OSError, KeyError, TypeError, ValueError) as error:
            log.warning("%s cannot be taken up: %s", result.id, error)
    for entry in journal.entries(service.name):
        try:
            keep(service, _later(entry))
            count += 1
        except (RequestError, ValueError) as error:  # pydantic's are ValueErrors
            log.warning("%s stays in the journal, since this server refuses it: %s", entry.id, error)
    service.kept.is_complete = True
    return count


def _later(entry: JournaledRequest) -> LaterRequest:
    kind = REQUESTS.get(entry.route, GenerationRequest)
    return LaterRequest(
        route=entry.route,
        wanted=kind.model_validate_json(json.dumps({**entry.request, "seed": entry.seed})),
        owner=entry.owner,
        uploads=entry.uploads,
        key=entry.key,
        digest=bytes.fromhex(entry.digest),
        entry=entry,
    )


def _finished(service: ImageService, found: FinishedResult) -> KeptJob:
    """Return the job of a result. Raises OSError, KeyError, TypeError and ValueError."""
    result: Any = found.result
    if found.route == "video":
        result = service.videos.adopt(found.id, found.folder, found.result)
    work = KeptWork(
        owner=found.owner,
        request=REQUESTS[found.route].model_validate_json(json.dumps(found.request)),
        finish=lambda _, done: done,
        drop=partial(_dropped, service),
        size=_bytes_of,
        route=found.route,
    )
    call = ImageCall(arguments={}, seed=found.seed, count=1, size=(0, 0))  # its result has the size
    kept = KeptJob(work, ended_job(found.steps, found.steps), call, name=found.id, created_at=found.created_at)
    kept.complete(result, found.completed_at)
    kept.key, kept.digest = found.key, bytes.fromhex(found.digest)
    return kept


def _bytes_of(result: Any) -> int:
    """Return what a result takes: a video in its folder, images in memory. Raises OSError."""
    if isinstance(result, StoredVideo):
        return result.bytes
    return sum(len(each.get("b64_json", "")) for each in result["data"])


def _dropped(service: ImageService, kept: KeptJob, result: Any) -> None:
    """Delete the files of a result, also those that an earlier server has left in the journal."""
    if isinstance(result, StoredVideo):
        result.delete()
    else:
        for each in (each for each in result["data"] if "url" in each):
            service.files.delete(each["url"])
    if service.journal is not None:
        service.journal.remove(kept.id)


def _result(service: ImageService, kept: KeptJob, made: Any) -> Any:
    """Return what is kept of what a job has made: a StoredVideo, or the JSON of a response."""
    if isinstance(made, GeneratedVideo):
        return service.videos.store(kept.id, made, frame_rate_of(kept.work.request, service.generator.description))
    return response_of(kept.job, made, service.files)


def _ended(service: ImageService, kept: KeptJob) -> None:
    """Keep nothing of a job in the journal, unless the next server goes on with it."""
    if service.journal is not None and not isinstance(kept.error, Journaled):
        service.journal.remove(kept.id)
