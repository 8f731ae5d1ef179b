"""Routes of videos: create, poll, list, content, cancel, delete; or wait for the file."""

import asyncio
from hashlib import sha256
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from patchpar.serving.http.access import owner_of
from patchpar.serving.http.job_outcome import unless_gone
from patchpar.serving.http.jobs import page_of
from patchpar.serving.http.request_body import FORM, idempotency_key_of, kind_of, read_body, read_form
from patchpar.serving.http.video_view import video_view
from patchpar.serving.http.warning import warning_of
from patchpar.serving.kept_jobs import KeptJob
from patchpar.serving.kept_requests import LaterRequest, keep
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.uploaded_image import Uploads, check_upload, checked_aside
from patchpar.serving.video_files import StoredVideo
from patchpar.serving.video_request import VideoRequest, parse_video, parse_video_form

REFERENCE = "input_reference"
POLL_HEADER, POLL_MS = "openai-poll-after-ms", "500"
VARIANTS = ("video", "thumbnail")


def add_videos(app: FastAPI, service: ImageService) -> None:
    """Add the routes."""
    _add_new(app, service)
    _add_kept(app, service)
    _add_content(app, service)


def _add_new(app: FastAPI, service: ImageService) -> None:
    @app.post("/v1/videos")
    async def create(request: Request) -> JSONResponse:
        """Queue a video."""
        kept = await _created(service, request)
        return JSONResponse(video_view(service, kept), headers={**_poll(), **warning_of(service, kept.work.request)})

    @app.post("/v1/videos/sync")
    async def create_and_wait(request: Request) -> Response:
        """Generate a video and return its file. A client that disconnects cancels it."""
        kept = await _created(service, request, is_kept=False)
        try:
            await unless_gone(kept.ended, request)
            if kept.error is not None:
                raise kept.error
            content = await asyncio.to_thread(kept.result.file.read_bytes)
            view = video_view(service, kept)
        finally:
            service.kept.delete(kept)
        named = {f"x-video-{name}": str(view[name]) for name in ("id", "seconds", "size")}
        return Response(content, media_type="video/mp4", headers=named)


def _add_kept(app: FastAPI, service: ImageService) -> None:
    def found(request: Request, name: str) -> KeptJob:
        return service.kept.get(name, "video", owner_of(request))

    @app.get("/v1/videos")
    async def videos(request: Request) -> dict[str, Any]:
        """List videos."""
        kept = service.kept.all_of("video", owner_of(request))
        return page_of(request, kept, lambda each: video_view(service, each))

    @app.get("/v1/videos/{name}")
    async def video(request: Request, name: str) -> JSONResponse:
        """Return the state of a video."""
        return JSONResponse(video_view(service, found(request, name)), headers=_poll())

    @app.post("/v1/videos/{name}/cancel")
    async def cancel(request: Request, name: str) -> dict[str, Any]:
        """Cancel a video: at once while it waits, else before its next call of a denoiser."""
        kept = found(request, name)
        kept.job.cancel()
        return video_view(service, kept)

    @app.delete("/v1/videos/{name}")
    async def delete(request: Request, name: str) -> dict[str, Any]:
        """Cancel a video and delete its file."""
        service.kept.delete(found(request, name))
        return {"id": name, "object": "video.deleted", "deleted": True}


def _add_content(app: FastAPI, service: ImageService) -> None:
    @app.get("/v1/videos/{name}/content")
    async def content(request: Request, name: str) -> Response:
        """Return the file of a video, or its first frame."""
        variant = request.query_params.get("variant", "video")
        if variant not in VARIANTS:
            raise RequestError(f"variant={variant[:40]!r}: use {' or '.join(VARIANTS)}", param="variant")
        kept = service.kept.get(name, "video", owner_of(request))
        if not isinstance(kept.result, StoredVideo):
            raise RequestError(f"this video is {kept.status}: it has no file yet", status=409, code="not_ready")
        if variant == "thumbnail":
            return FileResponse(kept.result.thumbnail, media_type="image/webp")
        return FileResponse(kept.result.file, media_type="video/mp4", filename=kept.result.file.name)


async def _created(service: ImageService, request: Request, *, is_kept: bool = True) -> KeptJob:
    """Queue the video of a request, as JSON or as a form. Raises RequestError.

    `is_kept`: otherwise it is deleted with the response, and is none that another request has made.
    """
    wanted, uploads, digest = await _read(service, request)
    later = LaterRequest(
        route="video",
        wanted=wanted,
        owner=owner_of(request),
        uploads=uploads,
        key=idempotency_key_of(request) if is_kept else "",
        digest=digest,
        is_awaited=not is_kept,
    )
    return await asyncio.to_thread(keep, service, later)


async def _read(service: ImageService, request: Request) -> tuple[VideoRequest, Uploads, bytes]:
    limits = service.settings.limits
    if kind_of(request) != FORM:
        body = await read_body(request, limits.body_bytes)
        return parse_video(body), Uploads(), sha256(body).digest()
    form = await read_form(request, limits.form_bytes)
    form.check_files(REFERENCE)
    wanted = parse_video_form(dict(form.values))
    files = form.files.get(REFERENCE, ())
    if len(files) > 1:
        raise RequestError(f"{len(files)} files: send one", param=REFERENCE)
    service.check_room(wanted, owner_of(request), idempotency_key_of(request))  # before files are decoded
    images = [await checked_aside(check_upload, data, REFERENCE) for data in files]
    return wanted, Uploads(images=tuple(images)), form.digest()


def _poll() -> dict[str, str]:
    return {POLL_HEADER: POLL_MS}
