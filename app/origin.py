"""Where requests come from: cross-site ones are refused, and those of a proxy have its path before the page's.

Only the page itself may upload, start and cancel.

A browser sends what another page's form or script tells it to send here; it says so in headers that no script can set.
Programs that are no browsers send neither header, and reach what anybody reaches who can open a connection.
"""

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from patchpar.web.http_page import is_own_origin
from patchpar.web.server import PREFIX, prefix_of

HARMLESS = ("GET", "HEAD", "OPTIONS")
HOST = "x-forwarded-host"
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


class BehindProxy:
    """ASGI middleware of Gradio's application: its addresses have the name and the path that a proxy has for the page.

    Gradio knows X-Forwarded-Host, and leaves out the page's own path then; of X-Forwarded-Prefix it knows nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            headers = MutableHeaders(raw=[*scope["headers"]])
            if host := headers.get(HOST, "").partition(",")[0].strip():
                del headers[HOST]
                headers["host"] = host
            prefix = prefix_of(headers.get(PREFIX, ""))
            if scope["root_path"].startswith(prefix):  # which Gradio may have been told
                prefix = ""
            paths = {name: prefix + scope[name] for name in ("root_path", "path")}
            scope = {**scope, **paths, "headers": headers.raw}
        await self._app(scope, receive, send)
