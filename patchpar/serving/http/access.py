"""The outermost layer of every request: an ID, the API key, counts, and errors in one form."""

import logging
import secrets
import time
from hashlib import sha256

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.http.failures import request_error_of
from patchpar.serving.job import Cancelled
from patchpar.serving.metrics import ServerMetrics
from patchpar.serving.request_error import RequestError

OPEN = ("/health/live", "/health/ready", "/version")
"""Paths that need no key."""
ADMIN = "/admin/"
"""Begin of paths that need a key of administrators."""
NO_ROUTE = "none"
ID_HEADER = b"x-request-id"
GONE = 499
"""The status under which a client that disconnected is counted, as nginx does."""
log = logging.getLogger(__name__)


class RequestGuard:
    """ASGI middleware. Sets `scope["state"]["request_id"]`, which is also a header of the response, and "owner"."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, admin_keys: ApiKeys, metrics: ServerMetrics) -> None:
        self._app, self._keys, self._admin_keys, self._metrics = app, keys, admin_keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
            await send(message)

        try:
            await self._answered(scope, receive, answer, request_id)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._metrics.observe_response(route, status, time.perf_counter() - start)

    async def _answered(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        try:
            if scope["path"] not in OPEN:
                scope["state"]["owner"] = self._key_of(scope)
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as error:
            refusal = request_error_of(error, request_id)
            if refusal.status >= 500 and not isinstance(error, (RequestError, Cancelled)):
                log.exception("request %s failed", request_id)
            await error_response(refusal)(scope, receive, send)

    def _key_of(self, scope: Scope) -> str:
        """Return a name of the request's key, "" on a server without keys. Raises RequestError for a wrong one."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        keys = self._admin_keys if scope["path"].startswith(ADMIN) else self._keys
        if scope["path"].startswith(ADMIN) and not keys:
            raise RequestError(
                "this server has no admin key: start it with --admin-key-file", status=403, code="no_admin_key"
            )
        if not keys.accept(given):
            raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")
        return sha256(given.partition(b" ")[2].strip()).hexdigest() if keys else ""


def owner_of(request: Request) -> str:
    """Return a name of the key that a request was sent with; "" on a server without keys."""
    return str(request.scope["state"]["owner"])


def error_response(error: RequestError) -> JSONResponse:
    """Return the response of an error."""
    return JSONResponse(error.body, status_code=error.status, headers=dict(error.headers))
