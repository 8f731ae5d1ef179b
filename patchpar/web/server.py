"""A web server in a thread, whose port is bound before a model is loaded."""

import errno
import ipaddress
import logging
import socket
import threading
import time
from typing import Any
from urllib.parse import quote

from patchpar.errors import LaunchError, PlanError

HOME = "127.0.0.1"
PREFIX = "x-forwarded-prefix"
"""The header in which proxies name the path that they have removed from that of the request."""
START_SECONDS, STOP_SECONDS = 30.0, 10.0
OTHER_MACHINE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that is none of this machine: the second one of IPv6, where it is switched off."""
REFUSED = "ASGI callable returned without completing handshake."
"""What uvicorn logs as an error where a WebSocket was refused with a response of its own."""


def is_local(host: str) -> bool:
    """Whether only this machine can reach ports of `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_of(host: str) -> list[str]:
    """Return the host names that requests may use: on a loopback `host` it and local names, against DNS rebinding."""
    own = f"[{host}]" if ":" in host else host
    return [*dict.fromkeys(("localhost", HOME, "[::1]", own))] if is_local(host) else ["*"]


def trusted(names: list[str]) -> list[str]:
    """Return `names` for TrustedHostMiddleware: older versions of starlette read "[" as the name in `[::1]:7860`."""
    return [*names, "["]


def prefix_of(header: str) -> str:
    """Return the path before which proxies serve this, as X-Forwarded-Prefix names it, one after another; or ""."""
    names = (each.strip().strip("/") for each in header.split(","))
    return "".join(f"/{quote(name)}" for name in names if name)


def _is_news(record: logging.LogRecord) -> bool:
    return record.getMessage() != REFUSED


def _way_out(error: OSError | UnicodeError, flag: str) -> str:
    """Return what is wrong with an address, and whether another port helps, by the option `flag`."""
    if isinstance(error, (UnicodeError, socket.gaierror)) or error.errno in OTHER_MACHINE:
        reason = getattr(error, "strerror", None) or "it is no name of a machine"
        return f"{reason}; choose an address of this machine with --host, such as {HOME}, or 0.0.0.0 for all of them"
    return f"{error.strerror}; choose another port with {flag}, or {flag} 0 for any free port"


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError, also on a machine without IPv6, and UnicodeError."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen()
    except BaseException:
        found.close()
        raise
    return found


def check_port(port: int, flag: str) -> None:
    """Raise PlanError for a number that is no port, from command-line option `flag`."""
    if not 0 <= port <= 65535:
        raise PlanError(f"{flag} {port}: it must be a number from 1 to 65535, or 0 for any free port")


class WebServer:
    """A web server. Its port is bound at construction, so that a used port is refused before a model is loaded.

    `flag`: the command-line option for error messages. Browsers that connect before `serve` wait. Raises PlanError.
    """

    def __init__(self, host: str, port: int, flag: str) -> None:
        check_port(port, flag)
        self._host = host
        try:
            self._socket = _listening(host, port)
        except (OSError, UnicodeError) as error:
            raise PlanError(f"{host}:{port} cannot be used: {_way_out(error, flag)}") from error
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()  # a join that a signal interrupts takes the thread for ended in Python 3.11

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    @property
    def is_serving(self) -> bool:
        return self._thread is not None and not self._ended.is_set()

    def serve(self, application: Any, *, grace: int = 2) -> None:
        """Serve an ASGI application, with `grace` seconds for open responses at the end. Raises LaunchError."""
        import uvicorn

        from patchpar.web.port_protocol import PortProtocol

        config = uvicorn.Config(
            application,
            http=PortProtocol,
            log_level="warning",
            timeout_graceful_shutdown=grace,
            ws_per_message_deflate=False,
        )
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="patchpar-port", daemon=True)
        self._thread.start()
        give_up = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self.is_serving or time.monotonic() > give_up:
                raise LaunchError(f"the server at {self.url} did not start: see its output above")
            time.sleep(0.02)

    def wait(self) -> None:
        while self.is_serving:
            self._ended.wait(0.5)

    def end(self) -> None:
        """Request the end of the server, without waiting."""
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        """End the server and free the port. Idempotent."""
        self.end()
        if self._thread is not None:
            self._ended.wait(STOP_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        finally:
            self._ended.set()
