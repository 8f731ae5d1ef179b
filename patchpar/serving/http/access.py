"""The outermost layer of every request: an ID, the host name, the API key, counts, and errors in one form."""

import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchpar.serving.http.failures import logged_error_of
from patchpar.serving.image_files import ROUTE
from patchpar.serving.metrics import ServerMetrics
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import ServerSettings
from patchpar.serving.socket_tickets import SocketTickets, offered_ticket

OPEN = ("/health/live", "/health/ready", "/version")
"""Paths that need no key."""
OPEN_LINKS = (ROUTE,)
"""Begins of paths that are keys themselves."""
ADMIN = "/admin/"
"""Begin of paths that need a key of administrators."""
ANY_HOST = "*"
PORT = re.compile(r":\d*$")
NO_ROUTE, NO_PATH = "none", "\0"
ID_HEADER = b"x-request-id"
GONE = 499
"""The status under which a client that disconnected is counted, as nginx does."""
REFUSED, MAX_REASON = 1008, 40
"""Close code of a refused WebSocket (RFC 6455: policy violation), and characters of the reason, 123 bytes at most."""
log = logging.getLogger(__name__)


class RequestGuard:
    """ASGI middleware. Sets `scope["state"]["request_id"]`, which is also a header of the response, and "owner".

    `settings`: has keys, begins of paths of a page with a log-in of its own, and the names by which requests may call
    this server, against DNS rebinding. `tickets`: of WebSockets without a key.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics, tickets: SocketTickets) -> None:
        self._app, self._keys, self._admin_keys, self._metrics = app, settings.keys, settings.admin_keys, metrics
        self._pages, self._hosts = settings.page_paths, settings.host_names
        self._tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or serve a WebSocket."""
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, request_id, status = time.perf_counter(), f"req_{secrets.token_hex(12)}", GONE
        scope.setdefault("state", {})["request_id"] = request_id

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (ID_HEADER, request_id.encode())]}
            with self._metrics.unsent.sending(request_id):
                await send(message)

        found: Send = answer
        if not scope["path"].startswith(self._pages or NO_PATH):  # which hold connections open as long as they are
            self._metrics.unsent.begin(request_id)
            if scope["method"] == "HEAD":
                scope, found = {**scope, "method": "GET"}, _head_of(answer)
        try:
            with suppress(ClientDisconnect):
                await self._answered(scope, receive, found, request_id, has_begun=lambda: status != GONE)
        finally:
            self._metrics.unsent.end(request_id)
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._metrics.observe_response(route, status, time.perf_counter() - start)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket with a key or a ticket. What is refused is closed before it is accepted, which is 403."""
        try:
            self._check_host(scope)
            if not scope["path"].startswith(self._pages or NO_PATH):
                scope.setdefault("state", {})["owner"] = self._ticket_of(scope) or self._key_of(scope)
            await self._app(scope, receive, send)
        except RequestError as error:
            await send({"type": "websocket.close", "code": REFUSED, "reason": str(error)[:MAX_REASON]})

    async def _answered(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, has_begun: Callable[[], bool]
    ) -> None:
        try:
            self._check_host(scope)
            if scope["path"] not in OPEN and not scope["path"].startswith((*self._pages, *OPEN_LINKS)):
                scope["state"]["owner"] = self._key_of(scope)
            await self._app(scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception as error:
            if has_begun():  # its status was sent, so that only the connection can say it
                log.exception("request %s failed after its response had begun", request_id)
                raise
            await error_response(logged_error_of(error, request_id))(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Raise RequestError for a request by a name that is not this server's."""
        given = _header_of(scope, b"host").decode("latin-1")
        if ANY_HOST not in self._hosts and PORT.sub("", given).lower() not in self._hosts:
            names = ", ".join(self._hosts)
            raise RequestError(
                f"Host {given[:80]!r}: this server answers to {names} only, so that no other page reaches it: let a "
                "proxy send one of these, or serve with --host and --api-key-file",
                code="foreign_host",
            )

    def _ticket_of(self, scope: Scope) -> str:
        """Return the owner that a ticket of a WebSocket names, "" without one. Raises RequestError for a wrong one."""
        ticket = offered_ticket(scope.get("subprotocols", ()))
        return "" if ticket is None else self._tickets.redeem(ticket, scope["path"])

    def _key_of(self, scope: Scope) -> str:
        """Return a name of the request's key, "" on a server without keys. Raises RequestError for a wrong one."""
        given = _header_of(scope, b"authorization")
        keys = self._admin_keys if scope["path"].startswith(ADMIN) else self._keys
        if scope["path"].startswith(ADMIN) and not keys:
            raise RequestError(
                "this server has no admin key: start it with --admin-key-file", status=403, code="no_admin_key"
            )
        if not keys.accept(given):
            raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")
        return sha256(given.partition(b" ")[2].strip()).hexdigest() if keys else ""


def _head_of(send: Send) -> Send:
    """Return what sends the head of a response, and then ends it as if the client had gone."""

    async def answer(message: Message) -> None:
        await send(message)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        raise ClientDisconnect

    return answer


def _header_of(scope: Scope, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == wanted), b"")


def owner_of(request: HTTPConnection) -> str:
    """Return a name of the key that a request was sent with; "" on a server without keys."""
    return str(request.scope["state"]["owner"])


def error_response(error: RequestError) -> JSONResponse:
    """Return the response of an error."""
    return JSONResponse(error.body, status_code=error.status, headers=dict(error.headers))
