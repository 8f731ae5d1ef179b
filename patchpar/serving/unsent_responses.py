"""Responses that have not been sent whole, and since when their clients have taken nothing of them."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class UnsentResponses:
    """By the ID of the request. The thread of the port writes it, and that which ends the server reads it."""

    def __init__(self) -> None:
        self._stalled: dict[str, float] = {}
        """When the part that is being sent was handed over; infinity while nothing is being sent."""

    @property
    def names(self) -> frozenset[str]:
        """The IDs."""
        return frozenset(tuple(self._stalled))

    def begin(self, name: str) -> None:
        """A request has come."""
        self._stalled[name] = float("inf")

    def end(self, name: str) -> None:
        """Its response has been sent, or never will be. Idempotent."""
        self._stalled.pop(name, None)

    @contextmanager
    def sending(self, name: str) -> Iterator[None]:
        """While a part of a response is sent, which lasts until the client has taken earlier ones."""
        if name not in self._stalled:
            yield
            return
        self._stalled[name] = time.monotonic()
        try:
            yield
        finally:
            if name in self._stalled:
                self._stalled[name] = float("inf")

    def unread_for(self, seconds: float) -> frozenset[str]:
        """Return those of which the client has taken nothing for so long, though there is something to take."""
        before = time.monotonic() - seconds
        return frozenset(name for name, since in tuple(self._stalled.items()) if since < before)

    def waited_for(self, names: Collection[str], seconds: float) -> bool:
        """Whether one of these is still to be sent, to a client that has taken something within `seconds`."""
        return bool(self.names.intersection(names) - self.unread_for(seconds))
