"""Errors as clients of OpenAI's interface read them: a status, and a body with message, type, param and code."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from patchpar.errors import PatchparError

KINDS = {429: "rate_limit_error"}
"""Types of errors by status, as OpenAI's clients know them; others are of the request itself, or of the server."""
NO_RETRY = {"x-should-retry": "false"}
"""What OpenAI's clients go by before the status."""
TOO_SLOW = 408
"""The status of a request whose body comes too slowly."""


class RequestError(PatchparError):
    """A request is refused, or has failed. `param`: the field that is wrong; `retry_after`: seconds, for clients.

    `is_final`: the same request would only fail again, or be made twice: OpenAI's clients repeat others with the
    statuses 408, 409, 429 and 5xx by themselves.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after: int | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_final = is_final
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        kind = "server_error" if self.status >= 500 else KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the response."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == TOO_SLOW:  # RFC 9110, section 15.5.9: what is still to come is not read
            found["Connection"] = "close"
        return {**found, **NO_RETRY} if self.is_final else found


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` resembles most, if any does."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)
