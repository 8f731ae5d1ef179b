"""The WebSocket of a stream.

client -> server    binary: mono audio, 16-bit little-endian, at `audio_rate` of the stream; JSON: controls
server -> client    {"type": "media_init"}, then fragments of MP4 as binary; {"type": "status" | "effect" | "error"};
                    {"type": "media_end"}
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any

from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from patchpar.serving.http.failures import logged_error_of
from patchpar.serving.request_error import RequestError
from patchpar.serving.socket_tickets import accepted_protocol
from patchpar.serving.streams.live_stream import LiveStream
from patchpar.serving.streams.stream_request import StreamControl, parse_control
from patchpar.serving.uploaded_image import checked_aside
from patchpar.web.http_page import send_video, until_one_ends

MAX_MESSAGE = 1 << 20
"""Bytes of audio in one message."""
STATUS_SECONDS = 0.5
log = logging.getLogger(__name__)


async def applied(stream: LiveStream, control: StreamControl) -> dict[str, Any]:
    """Apply a control in a thread, and return when it takes effect. Its image is decoded as those of all requests."""
    aside = asyncio.to_thread if control.image is None else checked_aside
    return await aside(stream.control, control)


class StreamSocket:
    """One client of a stream. Any number may watch and control it; it goes on when they leave."""

    def __init__(self, socket: WebSocket, stream: LiveStream) -> None:
        self._socket, self._stream = socket, stream

    async def run(self) -> None:
        """Serve the client until it leaves or the stream ends."""
        await self._socket.accept(subprotocol=accepted_protocol(self._socket.scope.get("subprotocols", ())))
        parts = (send_video(self._socket, self._stream.video), self._receive(), self._send_states())
        tasks = await until_one_ends(*parts)
        for error in [task.exception() for task in tasks if not task.cancelled()]:
            if error is not None and not isinstance(error, WebSocketDisconnect):
                log.error("a WebSocket of %s failed", self._stream.id, exc_info=error)
        if self._socket.client_state is self._socket.application_state is WebSocketState.CONNECTED:
            with suppress(WebSocketDisconnect):  # of a client that has left meanwhile
                await self._socket.close()

    async def _receive(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            answer = await self._answer(message)
            if answer is not None:
                await self._socket.send_json(answer)

    async def _answer(self, message: Any) -> dict[str, Any] | None:
        """Apply a message; return what the client is told: effects of controls, and errors."""
        try:
            data = message.get("bytes")
            if data is not None:
                if len(data) > MAX_MESSAGE:
                    raise RequestError(
                        f"{len(data)} bytes of audio in a message, and at most {MAX_MESSAGE} are taken",
                        status=413,
                        code="body_too_large",
                    )
                await asyncio.to_thread(self._stream.push, data)
                return None
            control = parse_control(message.get("text") or "")
            effect = await applied(self._stream, control)
        except Exception as error:  # noqa: BLE001  the client is told, and the stream goes on
            return {"type": "error", **logged_error_of(error, f"a message to {self._stream.id}").body}
        return {"type": "effect", "of": control.type, **effect}

    async def _send_states(self) -> None:
        last: tuple[Any, ...] = ()
        while True:
            session = self._stream.session
            now = (self._stream.status, session.dropped)
            if now != last:
                last = now
                state = {"type": "status", "status": now[0], "dropped": now[1], "behind": session.behind}
                await self._socket.send_json(state)
            await asyncio.sleep(STATUS_SECONDS)
