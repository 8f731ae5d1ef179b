"""Requests whose results are fetched later: as they come, and as the last server has left them in its journal."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from patchpar.serving.image_call import NO_UPLOADS
from patchpar.serving.image_request import EditRequest, GenerationRequest
from patchpar.serving.image_response import response_of
from patchpar.serving.job import Journaled
from patchpar.serving.kept_jobs import KeptJob, KeptWork
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.request_journal import JournaledRequest
from patchpar.serving.service import ImageService, QueuedImages
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterRequest:
    """A request whose result is kept. `key` and `digest`: see KeptJobs.add. `entry`: what the journal has of it."""

    route: str
    wanted: Any
    owner: str
    uploads: Uploads = NO_UPLOADS
    key: str = ""
    digest: bytes = b""
    entry: JournaledRequest | None = None


def keep(service: ImageService, later: LaterRequest) -> KeptJob:
    """Queue a request, and keep what comes of it. Raises RequestError."""
    calls: list[QueuedImages] = []
    is_video = later.route == "video"

    def submit() -> Any:
        begin = service.submit_video if is_video else service.submit
        kept = None if later.entry is None else later.entry.kept
        calls.append(begin(later.wanted, later.uploads, route=later.route, owner=later.owner, kept=kept))
        return calls[0].job

    work = KeptWork(
        kind="video" if is_video else "job",
        owner=later.owner,
        request=later.wanted,
        call=calls,
        finish=partial(_stored if is_video else _response, service, later.wanted, calls),
        drop=StoredVideo.delete if is_video else lambda _: None,
        images=getattr(later.wanted, "n", None) or 1,
        ended=partial(_ended, service),
    )
    entry = later.entry
    name, created_at = ("", None) if entry is None else (entry.id, entry.created_at)
    return service.kept.add(work, submit, key=later.key, digest=later.digest, name=name, created_at=created_at)


def take_up(service: ImageService) -> int:
    """Queue what the journal has, under the same IDs; return how many that is. Raises PlanError for another model."""
    if service.journal is None:
        return 0
    entries = list(service.journal.entries(service.name))
    for entry in entries:
        kind = REQUESTS.get(entry.route, GenerationRequest)
        wanted = kind.model_validate_json(_with_seed(entry))
        later = LaterRequest(
            route=entry.route,
            wanted=wanted,
            owner=entry.owner,
            uploads=entry.uploads,
            key=entry.key,
            digest=bytes.fromhex(entry.digest),
            entry=entry,
        )
        keep(service, later)
    return len(entries)


def _with_seed(entry: JournaledRequest) -> str:
    return json.dumps({**entry.request, "seed": entry.seed})


def _response(service: ImageService, wanted: Any, calls: list[QueuedImages], name: str, done: Any) -> dict[str, Any]:
    return response_of(wanted, calls[0].call, done, calls[0].job.queued_seconds)


def _stored(service: ImageService, wanted: Any, calls: list[QueuedImages], name: str, video: Any) -> StoredVideo:
    return service.videos.store(name, video, frame_rate_of(wanted, service.generator.description))


def _ended(service: ImageService, kept: KeptJob) -> None:
    if service.journal is not None and not isinstance(kept.error, Journaled):
        service.journal.remove(kept.id)
