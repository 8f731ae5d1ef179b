"""Links from device to device, over gloo between ranks that are threads: agreed on, used, late, cut, and made anew."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.device_links import DeviceLinks, drop_links, form_links
from patchpar.comm.transport import Incoming, LinkTransport, Outgoing, TensorSpec
from patchpar.errors import ExchangeError
from tests.unit.threads import connected, on_threads

LINKS = DeviceLinks(pairs=((0, 1), (1, 2), (2, 0)), sets=((0, 1),))
SPECS = (TensorSpec((3,), torch.float32), TensorSpec((2, 2), torch.int64))


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def linked(host: Any, card: str) -> Communicator:
    return Communicator(LinkTransport(host, "gloo", card))


def message(rank: int) -> list[Tensor]:
    return [torch.arange(3) + 0.5 * rank, torch.full((2, 2), rank)]


def around(comm: Communicator) -> bool:
    """Send to the next rank of three and receive from the one before; return whether that was what it sent."""
    rank = comm.transport.rank
    sent = comm.send("x", "test", [(rank + 1) % 3], message(rank))
    found = comm.receive("x", "test", (rank - 1) % 3, SPECS).wait_for(0)
    sent.wait()
    return all(map(torch.equal, found, message((rank - 1) % 3)))


def test_links_carry_what_the_host_carries_else() -> None:
    def run(host: Any, cards: list[str]) -> tuple[bool, list[tuple[int, int]], int]:
        comm = linked(host, cards[host.rank])
        form_links(comm, range(3), LINKS)
        transport: Any = comm.transport
        groups = sorted(transport._groups.links)
        form_links(comm, range(3), LINKS)
        assert sorted(transport._groups.links) == groups
        return around(comm), groups, len(transport._groups._own)

    assert on_threads(3, run, ["a", "b", "c"]) == [
        (True, [(0, 1), (2, 0)], 2),
        (True, [(0, 1), (1, 2)], 2),
        (True, [(1, 2), (2, 0)], 0),
    ]
    assert on_threads(3, run, ["a", "b", "b"]) == [
        (True, [(0, 1), (2, 0)], 2),
        (True, [(0, 1)], 2),
        (True, [(2, 0)], 0),
    ]
    assert on_threads(3, run, ["", "", ""]) == [(True, [], 0)] * 3


def test_one_message_to_ranks_with_a_link_and_without() -> None:
    def run(host: Any) -> Any:
        comm = linked(host, "b" if host.rank else "a")
        form_links(comm, range(3), DeviceLinks(pairs=((0, 1), (1, 2), (1, 0))))
        if host.rank == 1:
            comm.send("x", "test", [0, 2], message(1)).wait()
            return None
        return [x.tolist() for x in comm.receive("x", "test", 1, SPECS).wait()[0]]

    first, _, last = on_threads(3, run)
    assert first == last == [x.tolist() for x in message(1)]


def test_a_message_without_tensors_is_none() -> None:
    def run(host: Any) -> Any:
        comm = linked(host, str(host.rank))
        form_links(comm, range(2), DeviceLinks(pairs=((0, 1),)))
        if host.rank == 0:
            comm.send("x", "test", [1], []).wait()
            comm.send("x", "test", [1], message(0)).wait()
            return None
        nothing = comm.receive("x", "test", 0, []).wait()
        return nothing, [x.tolist() for x in comm.receive("x", "test", 0, SPECS).wait()[0]]

    assert on_threads(2, run)[1] == ([[]], [x.tolist() for x in message(0)])


def test_ranks_meet_at_one_file_for_all_generations() -> None:
    def run(host: Any) -> tuple[int, int]:
        comm = linked(host, str(host.rank))
        transport: Any = comm.transport
        for _ in range(3):
            form_links(comm, range(3), LINKS)
            drop_links(comm, "to make new groups")
        transport.close()
        return transport.generation, len(transport.files._stores)

    assert on_threads(3, run) == [(3, 1)] * 3


def test_a_rank_that_sends_nothing_is_noticed_within_the_deadline() -> None:
    """While it is there: the links' own limit is 10 s."""
    noticed = Event()

    def run(host: Any) -> float:
        comm = linked(host, str(host.rank))
        form_links(comm, range(2), DeviceLinks(pairs=((0, 1), (1, 0))))
        comm.transport.deadline = 0.3
        start = time.monotonic()
        if host.rank == 0:
            return float(noticed.wait(timeout=60))
        with pytest.raises(ExchangeError, match=r"no message from ranks \[0\] of shapes .* within 0.3 s"):
            comm.receive("x", "test", 0, SPECS).wait()
        with pytest.raises(ExchangeError, match="is not used again"):
            comm.receive("x", "test", 0, SPECS)
        noticed.set()
        return time.monotonic() - start

    found = on_threads(2, run)
    assert found[0] == 1.0, found
    assert 0.3 <= found[1] < 9.0, found


def test_ranks_that_stay_meet_a_new_one_in_new_groups() -> None:
    """Rank 1 goes and comes back with new sockets; the others keep their transports."""
    hosts = connected(3)
    comms = [linked(host, str(host.rank)) for host in hosts]
    assert on_each(comms, lambda comm: form_links(comm, range(3), LINKS)) == [None] * 3
    assert on_each(comms, around) == [True] * 3
    comms[1].transport.close()
    for stays in (0, 2):
        with pytest.raises(ExchangeError, match="rank 1 is gone"):
            comms[stays].host.receive("x", "test", 1, SPECS).wait()
        drop_links(comms[stays], "rank 1 is gone")
    lines: dict[int, socket.socket] = {}
    for stays in (0, 2):
        lines[stays], other = socket.socketpair()
        hosts[stays].add({1: other})
    comms[1] = linked(type(hosts[0])(1, lines, torch.device("cpu"), 10.0), "1")
    assert on_each(comms, lambda comm: form_links(comm, range(3), LINKS)) == [None] * 3
    assert on_each(comms, around) == [True] * 3
    for comm in comms:
        comm.transport.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_rank_without_groups_is_enough_for_new_ones() -> None:
    """As one that has been started anew, before the others have noticed."""
    comms = [linked(host, str(host.rank)) for host in connected(3)]
    on_each(comms, lambda comm: form_links(comm, range(3), LINKS))
    drop_links(comms[1], "it has lost them")
    assert on_each(comms, lambda comm: form_links(comm, range(3), LINKS)) == [None] * 3
    assert [comm.transport.generation for comm in comms] == [2] * 3  # type: ignore[attr-defined]
    assert on_each(comms, around) == [True] * 3
    for comm in comms:
        comm.transport.close()


def test_a_rank_without_a_card_has_no_links() -> None:
    links = DeviceLinks(pairs=((0, 1), (1, 2)), sets=((0, 1), (1, 2)))
    assert links.between({0: "a", 1: "b", 2: ""}) == DeviceLinks(pairs=((0, 1),), sets=((0, 1),))
    assert links.between({0: "a", 1: "a", 2: "b"}) == DeviceLinks(pairs=((1, 2),), sets=((1, 2),))


def on_each(comms: list[Communicator], function: Callable[[Communicator], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(comms)) as pool:
        return list(pool.map(function, comms))


def test_whether_a_connection_is_cut_is_known_without_reading() -> None:
    """The message that lies there is still all there for who is to have it."""
    one, other = connected(2)
    sent = torch.arange(3.0)
    assert not one.is_cut
    other.send_recv([Outgoing((0,), (sent,))], [], "test").wait()
    assert not one.is_cut
    ((got,),) = one.send_recv([], [Incoming(1, (TensorSpec.of(sent),))], "test").wait()
    assert torch.equal(got, sent)
    other.close()
    assert one.is_cut
    one.close()


def test_a_connection_that_this_rank_has_closed_is_cut() -> None:
    one, other = connected(2)
    one._lines[1].link.close()
    assert one.is_cut
    one.close()
    other.close()
