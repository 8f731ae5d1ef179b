"""Serves until a signal: the port first, then the model; at the end what was accepted is finished.

A second signal ends it at once, whatever is under way, and so does the first one while the model is loaded.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from fastapi import FastAPI

from patchpar.launch.shutdown import computation_abandoned, ended_at_once, signals_unwind
from patchpar.serving.http.application import application, stream_application
from patchpar.serving.kept_requests import take_up
from patchpar.serving.service import ImageService
from patchpar.serving.streams.stream_service import StreamService
from patchpar.web.server import WebServer

WRITE_SECONDS = 2
"""Time for the last responses to be sent, where the grace period is over."""
UNREAD_SECONDS = 5.0
"""A client that has taken nothing of its response for so long is not waited for."""
LOOK_SECONDS = 0.05
"""Between looks at responses that are being sent."""


class Page(Protocol):
    """A page of the same server, on the same queue."""

    def add_to(self, app: FastAPI) -> None:
        """Add it to the application, before that starts."""

    def begin(self) -> None:
        """Called once the model is loaded."""

    def close(self) -> None:
        """End what it has of its own."""


class ModelServer:
    """A server of one model. A context manager; `url` is where it is served, from `start` on."""

    def __init__(self, service: ImageService | StreamService, page: Page | None = None) -> None:
        self.service, self.page = service, page
        settings = service.settings
        self._port = WebServer(settings.host, settings.port, "--port")
        self.url = self._port.url

    def start(self) -> None:
        """Begin to serve. Requests for images are refused until the model is loaded. Raises LaunchError."""
        service = self.service
        app = stream_application(service) if isinstance(service, StreamService) else application(service)
        if self.page is not None:
            self.page.add_to(app)
        self._port.serve(app, grace=WRITE_SECONDS)

    def wait(self) -> None:
        """Wait until the port has ended."""
        self._port.wait()

    def drain(self) -> bool:
        """Accept nothing more, and finish what was accepted within the grace period. Return whether it has ended.

        Results are encoded and sent after their jobs have ended, which takes seconds for large images and slow clients.
        Those who read nothing are not waited for.
        """
        seconds, unsent = self.service.settings.grace, self.service.metrics.unsent
        give_up = time.monotonic() + seconds
        has_ended = self.service.drain(seconds)
        last = unsent.names
        while unsent.waited_for(last, UNREAD_SECONDS) and time.monotonic() < give_up:
            time.sleep(LOOK_SECONDS)
        return has_ended

    def close(self) -> None:
        """End requests, port and workers. Idempotent."""
        if self.page is not None:
            self.page.close()
        self.service.close()
        self._port.close()

    def __enter__(self) -> "ModelServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    service: ImageService | StreamService,
    announce: Callable[[str, float], Any],
    ending: Callable[[], Any],
    page: Page | None = None,
) -> None:
    """Serve until a signal. `announce` gets URL and seconds once it is ready; `ending` is called before the end.

    `page`: served beside it.

    Raises PlanError, LaunchError, and KeyboardInterrupt or SystemExit of the signal after accepted requests have ended.
    Exits where a call that cannot be cancelled still computes in this process then.
    """
    start = time.monotonic()
    with computation_abandoned(lambda: service.is_computing), ModelServer(service, page) as server:
        server.start()
        with ended_at_once():
            service.load()
            if isinstance(service, ImageService):
                take_up(service)
            if page is not None:
                page.begin()
        try:
            announce(server.url, time.monotonic() - start)
            server.wait()
        finally:
            with suppress(OSError):  # of a terminal that has gone, which SIGHUP may be about
                ending()
            with signals_unwind():  # a second signal counts too
                server.drain()
