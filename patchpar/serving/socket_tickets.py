"""Tickets for WebSockets of browsers, which can send no API key with one: a page's script cannot set its headers.

page --POST .../tickets, with the key--> ticket --Sec-WebSocket-Protocol--> WebSocket

A ticket opens one WebSocket of one path, once and soon. It is sent as a subprotocol (RFC 6455, section 1.9), so that no
URL has a secret in it, which logs and histories keep. Used from the event loop only.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256

from patchpar.serving.request_error import RequestError

TICKET_SECONDS = 60
MOST = 64
"""Tickets of one owner that are open at the same time."""
PROTOCOL = "patchpar.stream"
"""What the server accepts: it has to choose one of the protocols that a browser offers, and repeats no ticket."""
PREFIX = "patchpar.ticket."


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """What a ticket is good for. `ends`: on the clock."""

    digest: bytes
    path: str
    owner: str
    ends: float


class SocketTickets:
    """Tickets that have been issued and not redeemed, as SHA-256 digests. `clock` as time.monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: list[OpenTicket] = []

    def issue(self, path: str, owner: str) -> str:
        """Return a new ticket for a WebSocket of `path`. Raises RequestError, 429, if the owner has too many."""
        self._drop_late()
        if sum(each.owner == owner for each in self._open) >= MOST:
            reason = f"{MOST} tickets are open, and each holds for {TICKET_SECONDS} s: use these, or wait"
            raise RequestError(reason, status=429, code="above_limit", retry_after=TICKET_SECONDS)
        ticket = secrets.token_urlsafe(32)
        self._open.append(OpenTicket(_digest(ticket), path, owner, self._clock() + TICKET_SECONDS))
        return ticket

    def redeem(self, ticket: str, path: str) -> str:
        """Return the owner of a ticket, which holds no longer. Raises RequestError, 401, for a wrong one.

        All tickets are compared whatever the result: time shows nothing of one.
        """
        self._drop_late()
        given = _digest(ticket)
        matches = [each for each in self._open if hmac.compare_digest(given, each.digest)]
        self._open = [each for each in self._open if each not in matches]
        if not matches or matches[0].path != path:
            reason = f"the ticket is wrong, used or expired: POST {path[:80]}/tickets returns another one"
            raise RequestError(reason, status=401, code="invalid_ticket")
        return matches[0].owner

    def _drop_late(self) -> None:
        now = self._clock()
        self._open = [each for each in self._open if each.ends > now]


def protocols_of(ticket: str) -> list[str]:
    """Return the subprotocols that a browser gives to `WebSocket`."""
    return [PROTOCOL, PREFIX + ticket]


def offered_ticket(protocols: Iterable[str]) -> str | None:
    """Return the ticket among the subprotocols that a client offers."""
    return next((each.removeprefix(PREFIX) for each in protocols if each.startswith(PREFIX)), None)


def accepted_protocol(protocols: Iterable[str]) -> str | None:
    """Return the subprotocol that the server accepts of those that a client offers."""
    return PROTOCOL if PROTOCOL in protocols else None


def _digest(ticket: str) -> bytes:
    return sha256(ticket.encode()).digest()
