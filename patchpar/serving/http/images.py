"""Routes of images: from a prompt, and edits of uploaded ones; at once, as events, or as a job for later."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from patchpar.serving.http.access import owner_of
from patchpar.serving.http.event_stream import EventStream, event_of
from patchpar.serving.http.failures import logged_error_of
from patchpar.serving.http.files import with_whole_links
from patchpar.serving.http.job_events import events_of
from patchpar.serving.http.job_outcome import outcome_of, submitted
from patchpar.serving.http.jobs import job_view
from patchpar.serving.http.request_body import FormBody, idempotency_key_of, read_body, read_form
from patchpar.serving.http.warning import warning_of
from patchpar.serving.image_request import GenerationRequest, parse_edit, parse_request
from patchpar.serving.image_response import event_fields, response_of
from patchpar.serving.job import Job
from patchpar.serving.kept_requests import LaterRequest, keep
from patchpar.serving.partial_images import CompletedImage, PartialImage
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.uploaded_image import (
    MAX_PIXELS,
    UploadedImage,
    Uploads,
    check_mask,
    check_upload,
    checked_aside,
)

IMAGES = ("image", "image[]")
MASK = "mask"


def add_images(app: FastAPI, service: ImageService) -> None:
    """Add the routes."""
    limits = service.settings.limits

    @app.post("/v1/images/generations")
    async def generate(request: Request) -> Response:
        """Generate images from a prompt."""
        body = await read_body(request, limits.body_bytes)
        return await _answer(service, request, parse_request(body), Uploads(), "generation", sha256(body).digest())

    @app.post("/v1/images/edits")
    async def edit(request: Request) -> Response:
        """Generate images from a prompt and uploaded images."""
        form = await read_form(request, limits.form_bytes)
        form.check_files(*IMAGES, MASK)
        wanted = parse_edit(dict(form.values))
        service.check_room(wanted, owner_of(request), idempotency_key_of(request))  # before files are decoded
        uploads = await checked_aside(_uploads_of, form)
        return await _answer(service, request, wanted, uploads, "edit", form.digest())


async def _answer(
    service: ImageService, request: Request, wanted: GenerationRequest, uploads: Uploads, route: str, digest: bytes
) -> Response:
    """Answer with images, with events, or with a job whose result is kept."""
    if _is_later(request):
        return await asyncio.to_thread(_later, service, request, wanted, uploads, route, digest)
    submit = partial(service.submit, wanted, uploads, route=route, owner=owner_of(request))
    job = await submitted(submit) if uploads.images else submit()
    if wanted.stream:
        return EventStream(_events(job, request.scope["state"]["request_id"]), warning_of(service, wanted))
    content = await asyncio.to_thread(response_of, job, await outcome_of(job, request), service.files)
    return JSONResponse(with_whole_links(content, request), headers=warning_of(service, wanted))


def _is_later(request: Request) -> bool:
    value = request.query_params.get("async", "")
    if value.lower() not in ("", "0", "false", "1", "true"):
        raise RequestError(
            f"async={value[:40]!r}: true returns a job at once, false (the default) waits for the images", param="async"
        )
    return value.lower() in ("1", "true")


def _later(
    service: ImageService, request: Request, wanted: GenerationRequest, uploads: Uploads, route: str, digest: bytes
) -> Response:
    if wanted.stream:
        raise RequestError(
            "stream=true and ?async=true: leave one out; /v1/jobs/{id}/events has the events of a job", param="stream"
        )
    later = LaterRequest(
        route=route,
        wanted=wanted,
        owner=owner_of(request),
        uploads=uploads,
        key=idempotency_key_of(request),
        digest=digest,
    )
    return JSONResponse(
        job_view(service, keep(service, later), request), status_code=202, headers=warning_of(service, wanted)
    )


async def _events(job: Job, request_id: str) -> AsyncIterator[bytes]:
    """Yield partial and finished images as events, and an error as one; cancel the job if nobody reads them."""
    try:
        async for event in events_of(job, partial(rendered, job)):
            yield event
        job.outcome.result()
    except Exception as error:  # noqa: BLE001  the response has begun, so that an error is an event
        yield event_of("error", logged_error_of(error, request_id).body)
    finally:
        job.cancel()  # does nothing to a job that has ended


def rendered(job: Job, event: PartialImage | CompletedImage) -> bytes:
    """Return an event of a job as a server-sent event. Encodes its image."""
    fields = event_fields(job, event)
    return event_of(fields["type"], fields)


def _uploads_of(form: FormBody) -> Uploads:
    """Return the images and the mask of a form. Raises RequestError."""
    images, left = list[UploadedImage](), MAX_PIXELS
    for data in (data for name in IMAGES for data in form.files.get(name, ())):
        images.append(check_upload(data, "image", left))
        left -= images[-1].width * images[-1].height
    if not images:
        raise RequestError("there is no image: send a file in the field image", param="image", code="missing_parameter")
    masks = form.files.get(MASK, ())
    if len(masks) > 1:
        raise RequestError(f"{len(masks)} masks: send one", param=MASK)
    return Uploads(images=tuple(images), mask=check_mask(masks[0], MASK, images[0].size) if masks else None)
