"""Server-sent events: a response that goes on until its events end, or its client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEARTBEAT_SECONDS = 10.0
HEARTBEAT = b": still there\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # of nginx, which else keeps what is small until the response has ended
]


def event_of(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one event. `data` is sent as JSON, which has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


class EventStream(Response):
    """Sends `events` as they come. When the client disconnects, they are closed, so that their `finally` runs.

    `headers`: of the response, beside its own.
    """

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._events = events
        self._more = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body has been read."""
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._more]})
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending  # raises what has gone wrong
        finally:
            for task in (sending, gone):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _send(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]  # of an async generator


async def until_gone(receive: Receive) -> None:
    """Wait until the client of a request whose body has been read disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
