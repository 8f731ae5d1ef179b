"""Requests to an application, and what they wait for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi.testclient import TestClient

from patchpar.serving.service import ImageService

SECONDS = 20.0
PATH = "/v1/images/generations"
HOME = "http://127.0.0.1"


def client_of(app: Any, key: str | None = None) -> TestClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    return TestClient(app, base_url=HOME, headers=headers, raise_server_exceptions=False)


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
