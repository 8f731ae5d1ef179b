"""Serves until a signal: the port first, then the model; at the end what was accepted is finished.

A second signal ends it at once, whatever is under way, and so does the first one while the model is loaded.
"""

import time
from collections.abc import Callable
from typing import Any

from patchpar.serving.http.application import application
from patchpar.serving.service import ImageService
from patchpar.stream.web.server import WebServer
from patchpar.stream.web.shutdown import computation_abandoned, ended_at_once, signals_unwind

WRITE_SECONDS = 2
"""Time for the last responses to be sent."""


class ImageServer:
    """A server of images. A context manager; `url` is where it is served, from `start` on."""

    def __init__(self, service: ImageService) -> None:
        self.service = service
        settings = service.settings
        self._port = WebServer(settings.host, settings.port, "--port")
        self.url = self._port.url

    def start(self) -> None:
        """Begin to serve. Requests for images are refused until the model is loaded. Raises LaunchError."""
        self._port.serve(application(self.service), grace=WRITE_SECONDS)

    def wait(self) -> None:
        """Wait until the port has ended."""
        self._port.wait()

    def drain(self) -> bool:
        """Accept nothing more, and finish what was accepted within the grace period. Return whether it has ended."""
        return self.service.drain(self.service.settings.grace)

    def close(self) -> None:
        """End requests, port and workers. Idempotent."""
        self.service.close()
        self._port.close()

    def __enter__(self) -> "ImageServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(service: ImageService, announce: Callable[[str, float], Any], ending: Callable[[], Any]) -> None:
    """Serve until a signal. `announce` gets URL and seconds once it is ready; `ending` is called before the end.

    Raises PlanError, LaunchError, and KeyboardInterrupt or SystemExit of the signal after accepted requests have ended.
    Exits where a call that cannot be cancelled still computes in this process then.
    """
    start = time.monotonic()
    with computation_abandoned(lambda: service.is_computing), ImageServer(service) as server:
        server.start()
        with ended_at_once():
            service.load()
        try:
            announce(server.url, time.monotonic() - start)
            server.wait()
        finally:
            ending()
            with signals_unwind():  # a second signal counts too
                server.drain()
