"""Routes of the live page of a stream: the page, images, fragments over a WebSocket, and a status line.

What a page sends, see PageInputs: to /video {"type": "audio_begin", "rate", "channels"}, then 16-bit little-endian
samples as binary, then {"type": "audio_end"}; to /camera images in JPEG, PNG or WebP as binary. What cannot be used is
answered with {"type": "error", "message"}.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection

from patchpar.errors import PlanError
from patchpar.media.pcm_pipe import RATES, PcmFormat
from patchpar.plan.json_files import object_of
from patchpar.web.feed import ImageFeed, VideoFeed
from patchpar.web.page_input import PageCamera, PageInputs, PageMicrophone, image_of, samples_of
from patchpar.web.server import trusted

if TYPE_CHECKING:
    from patchpar.web.webrtc import RtcPeers

MAX_OFFER = 1 << 16
"""Bytes of a session description."""
NOT_OURS = 1008
"""Close code of a refused WebSocket (RFC 6455: policy violation)."""
FOREIGN = "this request was made by another page: open this one itself"
FRESH = {"Cache-Control": "no-store"}
UNFRAMED = {**FRESH, "Content-Security-Policy": "frame-ancestors 'self'"}
"""Of a page that other sites show in no frame, where they would have people click its buttons."""
UNEMBEDDED = {**FRESH, "Cross-Origin-Resource-Policy": "same-origin"}
"""Of images that browsers show in no page of another site, also where they leave out Sec-Fetch-Site."""
OWN = ("same-origin", "none")  # of Sec-Fetch-Site: this page's request, or the person's
NO_INPUTS = PageInputs()


def image_page(feed: ImageFeed, status: Callable[[], str], names: list[str]) -> FastAPI:
    """Return an app with a page of MJPEG. `names`: allowed host names."""
    app = _page("images", status, names, PageInputs())

    @app.get("/images", response_model=None)
    async def images(request: Request) -> Response:
        if not is_own_origin(request):
            return PlainTextResponse(FOREIGN, 403)
        return StreamingResponse(feed.parts(), media_type=feed.kind, headers=UNEMBEDDED)

    return app


def video_page(
    feed: VideoFeed,
    status: Callable[[], str],
    names: list[str],
    inputs: PageInputs = NO_INPUTS,
    peers: "RtcPeers | None" = None,
) -> FastAPI:
    """Return an app with a page that plays a video from a WebSocket, or by WebRTC from `peers`, and may send `inputs`.

    `names`: allowed host names.
    """
    app = _page("video" if peers is None else "webrtc", status, names, inputs)

    @app.websocket("/video")
    async def video(socket: WebSocket) -> None:
        if not await _accepted(socket):
            return
        receiver = PageReceiver(socket, inputs.microphone)
        await until_one_ends(_sent_whole(socket, feed), receiver.run())

    if inputs.camera is not None:
        _add_camera(app, inputs.camera)
    if peers is not None:
        _add_webrtc(app, peers)
    return app


def _add_webrtc(app: FastAPI, peers: "RtcPeers") -> None:
    @app.post("/webrtc", response_model=None)
    async def offer(request: Request) -> JSONResponse:
        if not is_own_origin(request):
            return JSONResponse({"message": FOREIGN}, 403)
        found = bytearray()
        async for part in request.stream():  # a declared length says nothing of a body that comes in chunks
            found += part
            if len(found) > MAX_OFFER:
                return JSONResponse({"message": f"an offer has at most {MAX_OFFER} bytes"}, 413)
        try:
            return JSONResponse(await peers.answer(bytes(found)))
        except PlanError as error:
            return JSONResponse({"message": str(error)}, 400)


def _add_camera(app: FastAPI, camera: PageCamera) -> None:
    @app.websocket("/camera")
    async def images(socket: WebSocket) -> None:
        if not await _accepted(socket):
            return
        try:
            camera.begin(socket)
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                if message.get("bytes"):
                    camera.put(socket, await asyncio.to_thread(image_of, message["bytes"]))
        except PlanError as error:
            with suppress(WebSocketDisconnect):  # of a page that has gone meanwhile
                await socket.send_json({"type": "error", "message": str(error)})
                await socket.close(NOT_OURS)
        finally:
            camera.end(socket)


def _page(kind: str, status: Callable[[], str], names: list[str], inputs: PageInputs) -> FastAPI:
    app = FastAPI(title="patchpar stream", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=trusted(names))
    text = Path(__file__).with_name("watch.html").read_text(encoding="utf-8")
    text = text.replace("{{kind}}", kind).replace("{{inputs}}", inputs.names)

    @app.get("/", response_model=None)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=UNFRAMED)

    @app.get("/status")
    async def state() -> dict[str, str]:
        return {"status": status()}

    return app


async def _accepted(socket: WebSocket) -> bool:
    """Accept a page of our own; others get the reason, which browsers show in their network log only."""
    if is_own_origin(socket):
        await socket.accept()
        return True
    await socket.send_denial_response(PlainTextResponse(FOREIGN, 403))
    return False


async def until_one_ends(*parts: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    """Run the parts of a connection until one ends, and cancel the others. Returns them as tasks that have ended.

    Errors are left in the tasks.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also where the server ends this
        for task in tasks:
            task.add_done_callback(_forget_error)
            task.cancel()
        await asyncio.wait(tasks)  # `gather` would raise another CancelledError than the one that ends this
    return tasks


def _forget_error(task: asyncio.Task[None]) -> None:
    """Take the error of a task that has ended with its browser, which asyncio would log."""
    if not task.cancelled():
        task.exception()


async def _sent_whole(socket: WebSocket, feed: VideoFeed) -> None:
    await send_video(socket, feed)
    await socket.close()


async def send_video(socket: WebSocket, feed: VideoFeed) -> None:
    """Send the fragments of a feed until its end: `media_init` with the MIME type, the header, and `media_end`."""
    has_begun = False
    async for fragment in feed.fragments():
        if not has_begun and feed.head is not None:
            await socket.send_json({"type": "media_init", "mime": feed.head.mime})
            await socket.send_bytes(feed.head.data)
            has_begun = True
        await socket.send_bytes(fragment.data)
    await socket.send_json({"type": "media_end"})


class PageReceiver:
    """Messages of one browser: audio for `microphone`, if there is one."""

    def __init__(self, socket: WebSocket, microphone: PageMicrophone | None) -> None:
        self._socket, self._microphone = socket, microphone
        self._format = PcmFormat(rate=RATES[0])  # that of the last audio_begin
        self._has_refused = False  # samples; the browser is told once

    async def run(self) -> None:
        """Take messages until the browser disconnects. What cannot be used is answered with an error."""
        try:
            while (message := await self._socket.receive())["type"] != "websocket.disconnect":
                try:
                    self._take(message)
                except PlanError as error:
                    await self._socket.send_json({"type": "error", "message": str(error)})
        finally:
            if self._microphone is not None:
                self._microphone.end(self)

    def _take(self, message: Any) -> None:
        """Use one message. Raises PlanError."""
        microphone, data = self._microphone, message.get("bytes")
        if microphone is None:
            raise PlanError("this stream takes no audio from the page: start it with --audio page")
        if data is not None:
            if not self._has_refused:
                self._has_refused = True
                microphone.put(self, (samples_of(data, self._format), self._format.rate))
                self._has_refused = False
            return
        self._has_refused = False
        control = object_of(message.get("text") or "", "the message")
        if control.get("type") == "audio_begin":
            form: Any = {"rate": control.get("rate"), "channels": control.get("channels", 1)}
            announced = PcmFormat(**form)
            microphone.begin(self)
            self._format = announced
        elif control.get("type") == "audio_end":
            microphone.end(self)
        else:
            raise PlanError(f"a message of type {control.get('type')!r}: send audio_begin, samples, audio_end")


def is_own_origin(request: HTTPConnection) -> bool:
    """Whether it comes from this page or none: browsers let any page open a WebSocket to any server, post, show images.

    They say so in headers that no script can set. Sec-Fetch-Site holds behind a server that gives this one another
    name, where Origin and Host differ; browsers leave it out beyond this machine without TLS, and some for WebSockets.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site in OWN
    try:
        return origin is None or urlsplit(origin).netloc == request.headers.get("host")
    except ValueError:  # brackets that are none of an address
        return False
