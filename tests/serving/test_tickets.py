"""Tickets for WebSockets: once, soon, for one path and one owner."""

from __future__ import annotations

import pytest

from patchpar.serving.request_error import RequestError
from patchpar.serving.socket_tickets import (
    MOST,
    TICKET_SECONDS,
    SocketTickets,
    accepted_protocol,
    offered_ticket,
    protocols_of,
)

PATH = "/v1/streams/stream_a"


def refused(tickets: SocketTickets, ticket: str, path: str = PATH) -> bool:
    with pytest.raises(RequestError, match="wrong, used or expired: POST") as raised:
        tickets.redeem(ticket, path)
    return raised.value.status == 401


def test_a_ticket_holds_once_soon_and_for_one_path() -> None:
    now = [0.0]
    tickets = SocketTickets(lambda: now[0])
    one, other, late, last = (tickets.issue(PATH, owner) for owner in ("a", "b", "a", "a"))
    assert refused(tickets, "")
    assert refused(tickets, one + "x")
    assert tickets.redeem(one, PATH) == "a"
    assert refused(tickets, one)
    assert refused(tickets, other, PATH + "b")
    assert refused(tickets, other), "a wrong path uses it up"
    now[0] = TICKET_SECONDS - 1
    assert tickets.redeem(late, PATH) == "a"
    now[0] = TICKET_SECONDS
    assert refused(tickets, last)
    assert tickets._open == []


def test_an_owner_has_so_many_and_others_have_their_own() -> None:
    now = [0.0]
    tickets = SocketTickets(lambda: now[0])
    made = {tickets.issue(PATH, "a") for _ in range(MOST)}
    assert len(made) == MOST
    with pytest.raises(RequestError, match=f"{MOST} tickets are open") as raised:
        tickets.issue(PATH, "a")
    assert (raised.value.status, raised.value.headers["Retry-After"]) == (429, str(TICKET_SECONDS))
    tickets.issue(PATH, "b")
    now[0] = TICKET_SECONDS
    tickets.issue(PATH, "a")


def test_no_ticket_stands_where_it_could_be_read() -> None:
    tickets = SocketTickets()
    ticket = tickets.issue(PATH, "a")
    assert ticket not in repr(tickets._open)
    protocols = protocols_of(ticket)
    assert offered_ticket(protocols) == ticket
    assert accepted_protocol(protocols) == "patchpar.stream", "the server repeats no ticket"
    assert accepted_protocol([]) is offered_ticket(["patchpar.stream"]) is None
