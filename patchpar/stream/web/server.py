"""A port with a server behind it, in a thread; taken before anything is loaded."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from typing import Any

from patchpar.errors import LaunchError, PlanError

HOME = "127.0.0.1"
START_SECONDS, STOP_SECONDS = 30.0, 10.0


def is_local(host: str) -> bool:
    """Whether only this machine can reach a port of this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_of(host: str) -> list[str]:
    """Names by which browsers may call it: on this machine no others, so that no foreign page can pose as it."""
    return ["localhost", HOME, "[::1]"] if is_local(host) else ["*"]


def check_port(port: int, flag: str) -> None:
    """Raise PlanError for a number that is no port; it came with `flag`."""
    if not 0 <= port <= 65535:
        raise PlanError(f"{flag} {port}: it is a number from 1 to 65535, or 0 for any that is free")


class WebServer:
    """Taken when it is made, so that one that somebody else has is found before anything is loaded. Raises PlanError.

    `flag`: what the person has said it with. Browsers that come before `serve` wait.
    """

    def __init__(self, host: str, port: int, flag: str) -> None:
        check_port(port, flag)
        self._host = host
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise PlanError(
                f"{host}:{port} cannot be had: {error.strerror}; choose another with {flag}, or {flag} 0 for any that "
                "is free"
            ) from error
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where browsers find it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    @property
    def is_serving(self) -> bool:
        """Whether somebody answers."""
        return self._thread is not None and self._thread.is_alive()

    def serve(self, application: Any, *, grace: int = 2) -> None:
        """Serve an ASGI application, with `grace` seconds for answers under way at the end. Raises LaunchError."""
        import uvicorn

        config = uvicorn.Config(
            application, log_level="warning", timeout_graceful_shutdown=grace, ws_per_message_deflate=False
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="patchpar-port", daemon=True)
        self._thread.start()
        give_up = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self.is_serving or time.monotonic() > give_up:
                raise LaunchError(f"the page did not come up at {self.url}: what it printed says why")
            time.sleep(0.02)

    def wait(self) -> None:
        """As long as it serves."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.5)

    def end(self) -> None:
        """Begin to close."""
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        """End. Idempotent."""
        self.end()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        self._server.run([self._socket])
