"""A port: from when it is bound until its server has ended, and what is left of it then."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from patchpar.errors import LaunchError, PlanError
from patchpar.web import server as server_module
from patchpar.web.server import HOME, WebServer, check_port, is_local

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def answering(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def address_of(server: WebServer) -> tuple[str, int]:
    return HOME, int(server.url.rpartition(":")[2])


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_ports_have_two_bytes() -> None:
    for port in (0, 1, 65535):
        check_port(port, "--port")
    for port in (-1, 65536):
        with pytest.raises(PlanError, match=f"--port {port}: it must be a number from 1 to 65535, or 0 for any free"):
            check_port(port, "--port")


@pytest.mark.parametrize(
    ("host", "is_home"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_addresses_that_only_this_machine_reaches(host: str, is_home: bool) -> None:
    assert is_local(host) is is_home


def test_who_connects_before_the_model_is_loaded_waits() -> None:
    with closing(WebServer(HOME, 0, "--port")) as server:
        assert server._socket.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR), "free again at once after its end"
        with socket.create_connection(address_of(server), 20) as link:
            link.sendall(REQUEST)
            server.serve(answering)
            assert link.recv(1 << 10).startswith(b"HTTP/1.1 204")


def test_a_port_that_is_refused_leaves_nothing_open() -> None:
    """Also while somebody keeps the error, which has the frames that it passed."""
    with socket.create_server((HOME, 0)) as other:
        before = descriptors()
        with pytest.raises(PlanError, match="cannot be used") as refused:
            WebServer(HOME, other.getsockname()[1], "--port")
        assert descriptors() == before
        assert refused.value.__cause__ is not None


def test_a_response_without_end_does_not_hold_up_the_end_of_its_server() -> None:
    begun = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            begun.set()
            await asyncio.Event().wait()

    server = WebServer(HOME, 0, "--port")
    server.serve(endless, grace=1)
    with socket.create_connection(address_of(server), 20) as link:
        link.sendall(REQUEST)
        assert begun.wait(20)
        server.close()
        assert not server.is_serving
    server.close()
    assert server._socket.fileno() == -1


@pytest.mark.parametrize(("seconds", "ends"), [(1e6, True), (0.1, False)])
def test_a_server_that_ends_before_it_serves_or_never_serves_is_an_error(
    seconds: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once in the first case, after START_SECONDS in the other."""
    go, found, server = threading.Event(), list[Exception](), WebServer(HOME, 0, "--port")
    monkeypatch.setattr(server_module, "START_SECONDS", seconds)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: ends or go.wait(120))

    def serve() -> None:
        try:
            server.serve(answering)
        except LaunchError as error:
            found.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(20)
    assert f"the server at {server.url} did not start" in str(*found)
    go.set()
    server.close()
    assert not server.is_serving


def test_who_waits_for_a_server_waits_for_its_end() -> None:
    server, waited = WebServer(HOME, 0, "--port"), list[bool]()
    server.serve(answering)
    assert server.is_serving

    def wait() -> None:
        server.wait()
        waited.append(server.is_serving)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.7)  # longer than it looks away
    assert thread.is_alive()
    server.end()
    thread.join(20)
    assert waited == [False]
    server.close()
