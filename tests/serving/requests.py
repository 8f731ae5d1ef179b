"""Requests to an application, and what they wait for."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from patchpar.serving.service import ImageService

SECONDS = 20.0
PATH = "/v1/images/generations"
HOME = "http://127.0.0.1"
SERVE = (Path(__file__).parents[2] / "docs" / "howto" / "serve.md").read_text()


def client_of(app: Any, key: str | None = None) -> TestClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    return TestClient(app, base_url=HOME, headers=headers, raise_server_exceptions=False)


def example_of_the_page(words: str) -> str:
    """The block of Python of the how-to on serving that has these words."""
    (found,) = [block for block in re.findall(r"^```py\n(.*?)^```$", SERVE, re.MULTILINE | re.DOTALL) if words in block]
    return str(found)


class Connected:
    """Stands for a connection of `websockets`, to an application that no port has."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __enter__(self) -> Connected:
        self.session.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self.session.__exit__(*reason)

    def __iter__(self) -> Iterator[str | bytes]:
        with suppress(WebSocketDisconnect):
            while True:
                yield self.recv()

    def send(self, message: str | bytes) -> None:
        send = self.session.send_text if isinstance(message, str) else self.session.send_bytes
        send(message)

    def recv(self) -> str | bytes:
        message = self.session.receive()
        if message["type"] == "websocket.close":
            raise WebSocketDisconnect
        found: str | bytes | None = message.get("text")
        return message["bytes"] if found is None else found


def is_busy(service: ImageService) -> bool:
    """Whether a request runs."""
    return bool(service._queue._running)


def until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"waited for {what}"
        time.sleep(0.005)


def disconnected(app: Any, body: dict[str, Any], when: Callable[[], bool]) -> list[Any]:
    """Send a request whose client disconnects as soon as `when` holds; return what the server sent."""
    parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        while not when():
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    return answered(app, PATH, "application/json", receive)


def sent_in_parts(
    app: Any,
    path: str,
    kind: str,
    parts: Sequence[bytes],
    before: Callable[[], object] = lambda: None,
    *,
    is_whole: bool = False,
) -> list[Any]:
    """Send the parts of a body, and then nothing, unless it `is_whole`; return what the server sent."""
    last = len(parts) - 1
    left = [
        {"type": "http.request", "body": part, "more_body": number < last or not is_whole}
        for number, part in enumerate(parts)
    ]

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        before()
        return left.pop(0)

    return answered(app, path, kind, receive)


def answered(app: Any, path: str, kind: str, receive: Callable[[], Any]) -> list[Any]:
    """What the server sends for a request with a body of this type that comes by `receive`."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", kind.encode())],
    }

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), SECONDS))
    return sent
