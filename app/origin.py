"""Refuses cross-site requests: only the page itself may upload, start and cancel.

A browser sends what another page's form or script tells it to send here; it says so in headers that no script can set.
Programs that are no browsers send neither header, and reach what anybody reaches who can open a connection.
"""

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from patchpar.stream.web.http_page import is_own_origin

HARMLESS = ("GET", "HEAD", "OPTIONS")
REFUSED = "This request was made by another page. Open this one itself."


class OwnRequests:
    """ASGI middleware that answers 403 to cross-site requests, to paths that begin with `prefix`."""

    def __init__(self, app: ASGIApp, prefix: str = "/") -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        is_here = scope["type"] == "http" and scope["path"].startswith(self._prefix)
        if is_here and scope["method"] not in HARMLESS and not is_own_origin(HTTPConnection(scope)):
            await PlainTextResponse(REFUSED, status_code=403)(scope, receive, send)
            return
        await self._app(scope, receive, send)
