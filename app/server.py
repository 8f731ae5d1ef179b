"""Serves the page: access, upload limits, shutdown."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from patchpar import PlanError
from patchpar.launch.shutdown import computation_abandoned, signals_ignored, signals_unwind
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.web.server import HOME, WebServer, check_port, is_local, names_of, trusted

from . import accessibility, click_feedback, event_stream, keyboard
from .feeds import LiveFeed
from .limits import MAX_BYTES
from .origin import BehindProxy, OwnRequests
from .page import STYLE, build, theme
from .state import AppState
from .workers import AppConfig

WAITING = 64  # events of pages; all are short, since jobs wait in the job queue
OVER = "this stream is over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of the page. `users`: names and passwords; without them anybody who reaches the port may use it.

    Raises PlanError for an address beyond this machine that nobody has to log in to, unless it `is_open` on purpose.
    """

    host: str = HOME
    port: int = 7860
    users: tuple[tuple[str, str], ...] = ()
    is_open: bool = False

    def __post_init__(self) -> None:
        check_port(self.port, "--port")
        if not self.is_local and not self.users and not self.is_open:
            raise PlanError(
                f"host {self.host}: everybody who reaches this machine could use it; add --auth NAME:PASSWORD, or "
                "--open if that is what you want"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_local(self.host)

    @property
    def names(self) -> list[str]:
        """Names by which browsers may call it."""
        return names_of(self.host)


def read_users(text: str | None, flag: str = "--auth") -> tuple[tuple[str, str], ...]:
    """The value of `flag`: a name and a password, or a file with a line of these for each user. Raises PlanError."""
    if text is None:
        return ()
    lines = [text]
    if ":" not in text:
        try:
            lines = [line for line in Path(text).read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text file"
            raise PlanError(
                f"{flag} {text}: {reason}; give NAME:PASSWORD, or a file with such a line for each user"
            ) from error
    pairs = [line.partition(":")[::2] for line in lines]
    if not pairs or not all(name.strip() and password for name, password in pairs):
        raise PlanError(f"{flag}: each user has a name and a password, as NAME:PASSWORD")
    return tuple((name.strip(), password) for name, password in pairs)


def application(state: AppState, address: Address) -> FastAPI:
    """The page and its live streams as one application. Sets Gradio's folder of files to that of `state`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OwnRequests)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=trusted(address.names))
    return add_page(app, state, address, "/")


def add_page(app: FastAPI, state: AppState, address: Address, path: str) -> FastAPI:
    """Add the page at `path`, and its live streams below it. Sets Gradio's folder of files to that of `state`."""
    os.environ["GRADIO_TEMP_DIR"] = str(
        state.uploads
    )  # the only setting of this folder in Gradio, read now and at every upload

    live_path = f"{path.rstrip('/')}/live/{{name}}"

    @app.get(live_path)
    async def live(name: str) -> StreamingResponse:
        feed = state.feeds.get(name)
        if feed is None:
            raise HTTPException(404, OVER)
        return StreamingResponse(feed.parts(), media_type=feed.kind, headers={"Cache-Control": "no-store"})

    async def live_page(scope: Scope, receive: Receive, send: Send) -> None:
        feed = state.feeds.get(scope["path_params"]["name"])
        page = feed.page if isinstance(feed, LiveFeed) else PlainTextResponse(OVER, 404)
        await page(scope, receive, send)

    app.mount(live_path, live_page)
    page = build(state).queue(max_size=WAITING, default_concurrency_limit=None, api_open=False)
    return gr.mount_gradio_app(
        app,
        page,
        path=path,
        server_name=address.host,
        server_port=address.port,
        auth=[*address.users] or None,
        footer_links=[],
        run_history=False,
        max_file_size=MAX_BYTES,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        app_kwargs={"middleware": [Middleware(BehindProxy)]},
        theme=theme(),
        css_paths=[STYLE],
        head=accessibility.HEAD + click_feedback.HEAD + keyboard.HEAD + event_stream.HEAD,
    )


class Server:
    """Serves until it is closed. A context manager; `url` is where."""

    def __init__(self, setup: AppConfig, address: Address) -> None:
        self._address, self._port = address, WebServer(address.host, address.port, "--port")
        self._state = AppState.open(setup)
        self.url = self._port.url

    def start(self) -> "Server":
        """Begin to serve. Raises LaunchError if it does not come up."""
        self._port.serve(application(self._state, self._address))
        return self

    def wait(self) -> None:
        """Until ctrl-C."""
        self._port.wait()

    @property
    def is_computing(self) -> bool:
        """Whether a job still runs after `close`, on a device in this process."""
        return self._state.is_computing

    def close(self) -> None:
        """End page, jobs and workers. Idempotent."""
        self._port.end()
        self._state.close()
        self._port.close()

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(setup: AppConfig, address: Address, announce: Callable[[str], Any], ending: Callable[[], Any]) -> None:
    """Serve until a signal; `announce` gets the page's address once it is served, `ending` is called before the end.

    Raises PlanError, and KeyboardInterrupt or SystemExit of the signal. Exits where a job still computes in this
    process then.
    """
    silence_libraries()
    setup.check()
    with signals_unwind():
        server = Server(setup, address)
        with computation_abandoned(lambda: server.is_computing):
            try:
                server.start()
                announce(server.url)
                server.wait()
            finally:
                with signals_ignored():
                    with suppress(OSError):  # of a terminal that has gone
                        ending()
                    server.close()
