"""The WebSocket of images: one in, one out, made from it; of those that come too fast only the newest is used.

client -> server    JSON: the fields of an edit, which hold for all further images; binary: an image file
server -> client    {"type": "settings", "seed"}; {"type": "image", "number", "dropped", "seconds"}, then its file as
                    binary; {"type": "error"}, after which it goes on
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from starlette.websockets import WebSocketDisconnect

from patchpar.serving.generated import GeneratedImages
from patchpar.serving.http.access import owner_of
from patchpar.serving.http.failures import logged_error_of
from patchpar.serving.http.job_outcome import submitted
from patchpar.serving.http.request_body import check_origin
from patchpar.serving.image_call import RANDOM_SEEDS
from patchpar.serving.image_encoding import image_bytes
from patchpar.serving.image_request import EditRequest, parse_edit_text
from patchpar.serving.job import Job
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.socket_tickets import TICKET_SECONDS, accepted_protocol, protocols_of
from patchpar.serving.uploaded_image import Uploads, check_upload, checked_aside
from patchpar.web.http_page import until_one_ends

PATH = "/v1/images"
MAX_MESSAGE = 8 << 20
"""Bytes of an image in a message."""
NAME = "image"
log = logging.getLogger(__name__)


def add_image_socket(app: FastAPI, service: ImageService) -> None:
    """Add the WebSocket, and tickets for it."""

    @app.post(f"{PATH}/tickets")
    async def ticket(request: Request) -> JSONResponse:
        """Return a ticket for the WebSocket, for browsers, which send no API key with it."""
        check_origin(request)
        made = service.tickets.issue(PATH, owner_of(request))
        view = {"object": "images.ticket", "protocols": protocols_of(made), "expires_in": TICKET_SECONDS}
        return JSONResponse(view, headers={"Cache-Control": "no-store"})

    @app.websocket(PATH)
    async def connect(socket: WebSocket) -> None:
        """Receive images, and send those that are made from them."""
        check_origin(socket)
        await ImageSocket(socket, service, owner_of(socket)).run()


class ImageSocket:
    """One client. As many of its images are in work as requests fit on the devices; they are sent in order."""

    def __init__(self, socket: WebSocket, service: ImageService, owner: str) -> None:
        self._socket, self._service, self._owner = socket, service, owner
        self._name = f"socket_{secrets.token_hex(12)}"  # in the log, and in what the client is told of it
        self._wanted: EditRequest | None = None
        self._newest: tuple[int, bytes, EditRequest] | None = None  # with the settings that were there before it
        self._changed = asyncio.Condition()
        self._jobs: deque[tuple[int, Job]] = deque()  # in work, in order
        self._sending = asyncio.Lock()  # an image and what is said of it follow one another
        self._number = self._dropped = 0

    async def run(self) -> None:
        """Serve the client until it leaves. What is in work then is cancelled."""
        await self._socket.accept(subprotocol=accepted_protocol(self._socket.scope.get("subprotocols", ())))
        try:
            tasks = await until_one_ends(self._receive(), self._begin(), self._send())
        finally:
            for _, job in self._jobs:
                job.cancel()
        for error in [task.exception() for task in tasks if not task.cancelled()]:
            if error is not None and not isinstance(error, WebSocketDisconnect):
                log.error("a WebSocket of images failed", exc_info=error)

    async def _receive(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes")
            try:
                await (self._set(message.get("text") or "") if data is None else self._push(data))
            except RequestError as error:
                await self._refuse(error)

    async def _set(self, text: str) -> None:
        """Take settings for all further images. Without a seed they get one, the same for all of them."""
        wanted = parse_edit_text(text.encode())
        seed = secrets.randbelow(RANDOM_SEEDS) if wanted.seed is None else wanted.seed
        self._wanted = wanted.model_copy(update={"seed": seed})
        await self._say({"type": "settings", "seed": seed})

    async def _push(self, data: bytes) -> None:
        if len(data) > MAX_MESSAGE:
            reason = f"{len(data)} bytes in a message, and at most {MAX_MESSAGE} are taken"
            raise RequestError(reason, status=413, code="body_too_large", param=NAME)
        if self._wanted is None:
            raise RequestError('there is no prompt: send JSON first, such as {"prompt": "..."}', param="prompt")
        async with self._changed:
            self._dropped += self._newest is not None
            self._newest = self._number, data, self._wanted
            self._number += 1
            self._changed.notify_all()

    async def _begin(self) -> None:
        """Queue the newest image whenever there is room for it."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._newest is not None and len(self._jobs) < self._most)
                assert self._newest is not None, "it was waited for"
                (number, data, wanted), self._newest = self._newest, None
            try:
                job = await self._queued(data, wanted)
                self._jobs.append((number, job))  # at once: `run` cancels what is in it
            except RequestError as error:
                await self._refuse(error, number)
                continue
            async with self._changed:
                self._changed.notify_all()

    async def _queued(self, data: bytes, wanted: EditRequest) -> Job:
        self._service.check_room(wanted, self._owner)  # before it is decoded
        uploads = Uploads(images=(await checked_aside(check_upload, data, NAME),))
        submit = partial(self._service.submit, wanted, uploads, route="edit", owner=self._owner, is_lasting=False)
        return await submitted(submit)

    @property
    def _most(self) -> int:
        """How many images may be in work at the same time."""
        served, ranks = self._service.served, self._service.generator.ranks
        degree = None if self._wanted is None else self._wanted.degree
        return max(1, ranks.in_service // (degree or served.devices_of(served.plan)))

    async def _send(self) -> None:
        """Send images in the order in which they came, each as soon as it is there."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._jobs))
                number, job = self._jobs[0]
            try:
                made: GeneratedImages = await asyncio.wrap_future(job.outcome)
            except Exception as error:  # noqa: BLE001  the client is told, and the next image may be made
                await self._refuse(logged_error_of(error, f"image {number} of {self._name}"), number)
            else:
                await self._deliver(number, job.source.request, made)
            async with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    async def _deliver(self, number: int, wanted: EditRequest, made: GeneratedImages) -> None:
        file = await asyncio.to_thread(
            image_bytes, made.images[0], wanted.output_format or "jpeg", wanted.output_compression
        )
        seconds = round(made.figures[0].seconds, 4)
        await self._say({"type": "image", "number": number, "dropped": self._dropped, "seconds": seconds}, file)

    async def _refuse(self, error: RequestError, number: int | None = None) -> None:
        view: dict[str, Any] = {"type": "error", **error.body}
        await self._say(view if number is None else {**view, "number": number})

    async def _say(self, message: Mapping[str, Any], file: bytes | None = None) -> None:
        async with self._sending:
            await self._socket.send_json(message)
            if file is not None:
                await self._socket.send_bytes(file)
