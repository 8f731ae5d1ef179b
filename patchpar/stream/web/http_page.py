"""Routes of the live page of a stream: the page, images, fragments over a WebSocket, and a status line."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI, WebSocket
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from patchpar.stream.web.feed import ImageFeed, VideoFeed

NOT_OURS = 1008
"""Close code of a refused WebSocket (RFC 6455: policy violation)."""
FRESH = {"Cache-Control": "no-store"}


def image_page(feed: ImageFeed, status: Callable[[], str], names: list[str]) -> FastAPI:
    """Return an app with a page of MJPEG. `names`: allowed host names."""
    app = _page("images", status, names)

    async def images() -> StreamingResponse:
        return StreamingResponse(feed.parts(), media_type=feed.kind, headers=FRESH)

    app.add_api_route("/images", images, methods=["GET"], response_model=None)
    return app


def video_page(feed: VideoFeed, status: Callable[[], str], names: list[str]) -> FastAPI:
    """Return an app with a page that plays a video from a WebSocket. `names`: allowed host names."""
    app = _page("video", status, names)

    async def video(socket: WebSocket) -> None:
        if not is_own_origin(socket):
            await socket.close(NOT_OURS)
            return
        await socket.accept()
        tasks = [asyncio.create_task(_sent_whole(socket, feed)), asyncio.create_task(_until_gone(socket))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app.add_api_websocket_route("/video", video)
    return app


def _page(kind: str, status: Callable[[], str], names: list[str]) -> FastAPI:
    app = FastAPI(title="patchpar stream", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=names)
    text = Path(__file__).with_name("watch.html").read_text(encoding="utf-8").replace("{{kind}}", kind)

    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=FRESH)

    async def state() -> dict[str, str]:
        return {"status": status()}

    app.add_api_route("/", page, methods=["GET"], response_model=None)
    app.add_api_route("/status", state, methods=["GET"])
    return app


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


async def _until_gone(socket: WebSocket) -> None:
    """Wait until the browser disconnects; its messages are ignored."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


def is_own_origin(socket: WebSocket) -> bool:
    """Whether the origin is this page or none: browsers let any page open a WebSocket to any server."""
    return is_same_origin(socket.headers.get("origin"), socket.headers.get("host"))


def is_same_origin(origin: str | None, host: str | None) -> bool:
    """Whether a request with these headers comes from a page of its own server, or from no page."""
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc == host
    except ValueError:  # brackets that are none of an address
        return False
