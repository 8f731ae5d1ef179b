"""WebSockets of streams whose server ends them: nothing that they have begun goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar.serving.http.stream_socket import StreamSocket
from patchpar.web.http_page import video_page
from patchpar.web.page_input import PageInputs


class SilentSocket:
    """A browser that connects and never says anything."""

    headers: dict[str, str] = {}  # noqa: RUF012
    scope: dict[str, Any] = {}  # noqa: RUF012

    async def accept(self, **options: Any) -> None:
        pass

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def send_json(self, message: Any) -> None:
        pass


class EmptyFeed:
    head = None

    async def fragments(self) -> Any:
        await asyncio.Event().wait()
        yield


def of_the_page(socket: Any) -> Coroutine[Any, Any, None]:
    feed: Any = EmptyFeed()
    app = video_page(feed, str, [], inputs=PageInputs())
    (route,) = (each for each in app.routes if getattr(each, "path", "") == "/video")
    found: Coroutine[Any, Any, None] = route.endpoint(socket)  # type: ignore[attr-defined]
    return found


def of_serve(socket: Any) -> Coroutine[Any, Any, None]:
    session = SimpleNamespace(dropped=0, behind=0.0)
    stream: Any = SimpleNamespace(id="a", video=EmptyFeed(), session=session, status="playing")
    return StreamSocket(socket, stream).run()


@pytest.mark.parametrize(("run", "parts"), [(of_the_page, 2), (of_serve, 3)])
def test_what_a_cancelled_one_has_begun_ends(run: Callable[[Any], Coroutine[Any, Any, None]], parts: int) -> None:
    async def left() -> int:
        before = len(asyncio.all_tasks())
        task = asyncio.create_task(run(SilentSocket()))
        while len(asyncio.all_tasks()) < before + 1 + parts:
            await asyncio.sleep(0)
        task.cancel()  # as a server does
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        return len(asyncio.all_tasks()) - before

    assert asyncio.run(asyncio.wait_for(left(), 20)) == 0
