"""Routes of streams: create, state, controls, end; video and images; and a WebSocket for all of it."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, StreamingResponse

from patchpar.errors import PlanError
from patchpar.serving.http.access import error_response, owner_of
from patchpar.serving.http.event_stream import HEARTBEAT, HEARTBEAT_SECONDS, EventStream, event_of
from patchpar.serving.http.failures import request_error_of
from patchpar.serving.http.request_body import FORM, check_origin, kind_of, read_body, read_form
from patchpar.serving.http.stream_socket import StreamSocket, applied
from patchpar.serving.request_error import RequestError
from patchpar.serving.socket_tickets import TICKET_SECONDS, protocols_of
from patchpar.serving.streams.live_stream import LiveStream
from patchpar.serving.streams.stream_request import LiveStreamRequest, parse_control, parse_stream, parse_stream_form
from patchpar.serving.streams.stream_service import StreamService
from patchpar.serving.uploaded_image import checked_aside, read_upload

REFERENCE, AUDIO, POSE = "reference", "audio_file", "pose"
FRESH = {"Cache-Control": "no-store"}
LIVE = {**FRESH, "X-Accel-Buffering": "no"}
"""Of what is watched while it is made: nginx is to pass it on at once."""
LOOK_SECONDS = 0.1


def add_streams(app: FastAPI, service: StreamService) -> None:
    """Add the routes."""
    _add_kept(app, service)
    _add_media(app, service)

    @app.post("/v1/streams")
    async def create(request: Request) -> JSONResponse:
        """Begin a stream."""
        wanted, files = await _read(service, request)
        stream = await asyncio.to_thread(service.create, wanted, owner_of(request), **files)
        return JSONResponse(stream_view(service, stream))


def add_no_streams(app: FastAPI) -> None:
    """Add routes that say why there are no streams."""

    @app.api_route("/v1/streams", methods=["GET", "POST"])
    async def streams(request: Request) -> JSONResponse:
        """Refuse."""
        reason = "this model is none for streams: serve one, such as embedded-face; it has a stream.json in its folder"
        return error_response(RequestError(reason, param="model", code="unsupported_model"))


def _add_kept(app: FastAPI, service: StreamService) -> None:
    def found(request: Request, name: str) -> LiveStream:
        return service.get(name, owner_of(request))

    @app.get("/v1/streams")
    async def streams(request: Request) -> dict[str, Any]:
        """List the streams that run, and the latest that have ended."""
        return {
            "object": "list",
            "data": [stream_view(service, each) for each in service.all_of(owner_of(request))[::-1]],
        }

    @app.get("/v1/streams/{name}")
    async def stream(request: Request, name: str) -> dict[str, Any]:
        """Return the state of a stream."""
        return stream_view(service, found(request, name))

    @app.post("/v1/streams/{name}/controls")
    async def control(request: Request, name: str) -> dict[str, Any]:
        """Apply a control, and return the block from which it holds."""
        stream = found(request, name)
        wanted = parse_control(await read_body(request, service.settings.limits.form_bytes))
        return {"type": "effect", "of": wanted.type, **await applied(stream, wanted)}

    @app.post("/v1/streams/{name}/tickets")
    async def ticket(request: Request, name: str) -> JSONResponse:
        """Return a ticket for the WebSocket of a stream, for browsers, which send no API key with it."""
        check_origin(request)
        found(request, name)
        made = service.tickets.issue(f"/v1/streams/{name}", owner_of(request))
        view = {"object": "stream.ticket", "protocols": protocols_of(made), "expires_in": TICKET_SECONDS}
        return JSONResponse(view, headers=FRESH)

    @app.get("/v1/streams/{name}/events")
    async def events(request: Request, name: str) -> EventStream:
        """Send the state of a stream as it changes."""
        stream = found(request, name)
        return EventStream(_events(service, stream))

    @app.delete("/v1/streams/{name}")
    async def delete(request: Request, name: str) -> dict[str, Any]:
        """End a stream now."""
        found(request, name).cancel()
        return {"id": name, "object": "stream.deleted", "deleted": True}


def _add_media(app: FastAPI, service: StreamService) -> None:
    @app.get("/v1/streams/{name}/video")
    async def video(request: Request, name: str) -> StreamingResponse:
        """Send the video, fragmented MP4 with audio, from the newest key frame on."""
        feed = service.get(name, owner_of(request)).video
        return StreamingResponse(feed.parts(), media_type=feed.kind, headers=LIVE)

    @app.get("/v1/streams/{name}/images")
    async def images(request: Request, name: str) -> StreamingResponse:
        """Send the frames as MJPEG, without audio."""
        feed = service.get(name, owner_of(request)).images
        return StreamingResponse(feed.parts(), media_type=feed.kind, headers=LIVE)

    @app.websocket("/v1/streams/{name}")
    async def connect(socket: WebSocket, name: str) -> None:
        """Send video, states and effects; receive audio and controls."""
        check_origin(socket)
        stream = service.get(name, owner_of(socket))
        await StreamSocket(socket, stream).run()


def stream_view(service: StreamService, stream: LiveStream) -> dict[str, Any]:
    """Return the JSON of a stream."""
    error = None if stream.error is None else request_error_of(stream.error, stream.id).body["error"]
    return {
        "id": stream.id,
        "object": "stream",
        "status": stream.status,
        "created_at": stream.created_at,
        "model": service.name,
        "fps": stream.fps,
        "seconds": round(stream.seconds, 3),
        "dropped": stream.session.dropped,
        "behind": round(stream.session.behind, 3),
        "audio": None if stream.rate is None else {"rate": stream.rate, "live_rate": stream.audio_rate},
        "error": error,
    }


async def _events(service: StreamService, stream: LiveStream) -> AsyncIterator[bytes]:
    last, quiet = None, 0.0
    while True:
        is_over = stream.over.is_set()
        if stream.status != last:
            last, quiet = stream.status, 0.0
            yield event_of("stream.status", stream_view(service, stream))
        elif quiet >= HEARTBEAT_SECONDS:
            quiet = 0.0
            yield HEARTBEAT
        if is_over:
            yield event_of("stream.ended", stream_view(service, stream))
            return
        await asyncio.sleep(LOOK_SECONDS)
        quiet += LOOK_SECONDS


async def _read(service: StreamService, request: Request) -> tuple[LiveStreamRequest, dict[str, Any]]:
    """Return a request and its files, as arguments of StreamService.create. Raises RequestError."""
    limits = service.settings.limits
    if kind_of(request) != FORM:
        return parse_stream(await read_body(request, limits.body_bytes)), {}
    form = await read_form(request, limits.form_bytes)
    readers: dict[str, Callable[[bytes], Any]] = {
        REFERENCE: lambda data: read_upload(data, REFERENCE),
        AUDIO: lambda data: _read_audio(data, service.audio_rate, limits.stream_seconds),
        POSE: _read_pose,
    }
    form.check_files(*readers)
    wanted = parse_stream_form(dict(form.values))
    service.check_room(wanted)  # before files are decoded
    found = {}
    for name, (data, *others) in form.files.items():
        if others:
            raise RequestError(f"{1 + len(others)} files: send one", param=name)
        found[name.removesuffix("_file")] = await checked_aside(readers[name], data)
    return wanted, found


def _read_pose(data: bytes) -> io.BytesIO:
    """Return the bytes of a video, whose images are read while the stream runs. Raises RequestError."""
    from patchpar.models.streaming.config import MOST_FPS
    from patchpar.stream.video_source import pose_frames

    try:
        next(pose_frames(io.BytesIO(data), MOST_FPS, 1, 1))
    except PlanError as error:
        raise RequestError(str(error), param=POSE, code="invalid_video") from None
    return io.BytesIO(data)


def _read_audio(data: bytes, rate: int | None, most: float) -> Any:
    """Return the AudioFile of the bytes of a file of at most `most` seconds, at `rate`. Raises RequestError."""
    from patchpar.media.audio_file import read_audio

    if rate is None:
        raise RequestError("this model takes no audio: leave the file out", param=AUDIO, code="unsupported_parameter")
    try:
        return read_audio(data, rate, most=most, name=AUDIO)
    except PlanError as error:
        raise RequestError(str(error), param=AUDIO, code="invalid_audio") from None
