"""The page on a port of this machine: who may see it, how much they may send, how it ends."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from patchpar import PlanError

from .limits import MOST_BYTES
from .page import STYLE, build, theme
from .studio import Studio
from .workers import Setup

HOME = "127.0.0.1"
WAITING = 64  # events of pages; each is short, as the work itself waits at the desk
START_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the page is. `users`: names and passwords; without them anybody who reaches the port may use it.

    Raises PlanError for an address beyond this machine that nobody has to log in to, unless it `is_open` on purpose.
    """

    host: str = HOME
    port: int = 7860
    users: tuple[tuple[str, str], ...] = ()
    is_open: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise PlanError(f"port {self.port}: it is a number from 1 to 65535, or 0 for any that is free")
        if not self.is_local and not self.users and not self.is_open:
            raise PlanError(
                f"host {self.host}: everybody who reaches this machine could use it; add --auth NAME:PASSWORD, or "
                "--open if that is what you want"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def names(self) -> list[str]:
        """Names by which browsers may call it: on this machine no others, so that no foreign page can pose as it."""
        return ["localhost", "127.0.0.1", "[::1]"] if self.is_local else ["*"]


def read_users(text: str | None) -> tuple[tuple[str, str], ...]:
    """`--auth`: a name and a password, or a file with a line of these for each user. Raises PlanError."""
    if text is None:
        return ()
    lines = [text]
    if ":" not in text:
        if not Path(text).is_file():
            raise PlanError("--auth: give NAME:PASSWORD, or a file with such a line for each user")
        lines = [line for line in Path(text).read_text().splitlines() if line.strip()]
    pairs = [line.partition(":")[::2] for line in lines]
    if not pairs or not all(name.strip() and password for name, password in pairs):
        raise PlanError("--auth: each user has a name and a password, as NAME:PASSWORD")
    return tuple((name.strip(), password) for name, password in pairs)


def bound_socket(address: Address) -> socket.socket:
    """The port, taken before anything is started. Raises PlanError if somebody else has it."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((address.host, address.port))
    except OSError as error:
        taken.close()
        raise PlanError(
            f"{address.host}:{address.port} cannot be had: {error.strerror}; choose another with --port, or --port 0 "
            "for any that is free"
        ) from error
    return taken


def application(studio: Studio, address: Address) -> FastAPI:
    """The page and its live pictures as one application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=address.names)

    @app.get("/live/{name}")
    async def live(name: str) -> StreamingResponse:
        feed = studio.feeds.get(name)
        if feed is None:
            raise HTTPException(404, "this stream is over")
        return StreamingResponse(feed.parts(), media_type=feed.kind, headers={"Cache-Control": "no-store"})

    page = build(studio).queue(max_size=WAITING, default_concurrency_limit=None, api_open=False)
    return gr.mount_gradio_app(
        app,
        page,
        path="/",
        server_name=address.host,
        server_port=address.port,
        auth=[*address.users] or None,
        footer_links=[],
        run_history=False,
        max_file_size=MOST_BYTES,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        theme=theme(),
        css_paths=[STYLE],
    )


class Server:
    """Serves until it is closed. A context manager; `url` is where."""

    def __init__(self, setup: Setup, address: Address) -> None:
        self._socket = bound_socket(address)
        self._studio = Studio.open(setup)
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(application(self._studio, address), log_level="warning", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="patchpar-app", daemon=True)

    def _serve(self) -> None:
        self._server.run([self._socket])

    def start(self) -> "Server":
        """Begin to serve. Raises PlanError if it does not come up."""
        self._thread.start()
        give_up = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > give_up:
                raise PlanError(f"the page did not come up at {self.url}: what it printed says why")
            time.sleep(0.02)
        return self

    def wait(self) -> None:
        """Until ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def close(self) -> None:
        """End page, jobs and workers. Idempotent."""
        self._server.should_exit = True
        self._studio.close()
        if self._thread.is_alive():
            self._thread.join(10)
        self._socket.close()

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(setup: Setup, address: Address, told: Callable[[str], Any]) -> None:
    """Serve until ctrl-C; `told` gets the page's address when it is there. Raises PlanError."""
    setup.check()
    server = Server(setup, address)
    try:
        server.start()
        told(server.url)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
