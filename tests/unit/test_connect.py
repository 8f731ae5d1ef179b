"""How ranks of one host get a line each to every other, through their links."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch

from patchpar.comm.transport import Incoming, LinkTransport, Outgoing, TensorSpec, Transport, connect, extend
from patchpar.errors import ExchangeError
from patchpar.launch.links import PeerLink


@dataclass
class OnThread:
    """A rank that is a thread of this process."""

    rank: int
    world_size: int
    links: Mapping[int, PeerLink] | None
    device: str = "cpu"
    wait_limit: float = 20.0
    waiting: AbstractContextManager[None] = field(default_factory=nullcontext)


def made(world: int) -> list[OnThread]:
    links: list[dict[int, PeerLink]] = [{} for _ in range(world)]
    for pair in combinations(range(world), 2):
        link(links, *pair)
    return [OnThread(rank, world, own) for rank, own in enumerate(links)]


def link(links: list[dict[int, PeerLink]], one: int, other: int) -> None:
    ends = socket.socketpair()
    links[one][other], links[other][one] = PeerLink(one, other, ends[0]), PeerLink(other, one, ends[1])


@pytest.fixture
def endpoints() -> Iterator[list[OnThread]]:
    found = made(4)
    yield found
    for this in found:
        leave(this)


def leave(this: OnThread) -> None:
    for each in (this.links or {}).values():
        each.close()


def reported(transport: Transport, world: int, ranks: tuple[int, ...] | None = None) -> list[float]:
    """What every other rank sends to this one."""
    others = tuple(rank for rank in ranks or range(world) if rank != transport.rank)
    own = torch.tensor([float(transport.rank)])
    incoming = [Incoming(rank, (TensorSpec.of(own),)) for rank in others]
    return [x.item() for (x,) in transport.send_recv([Outgoing(others, (own,))], incoming, "here").wait()]


def test_every_rank_gets_a_line_to_every_other_as_often_as_it_asks(endpoints: list[OnThread]) -> None:
    def run(this: OnThread) -> list[list[float]]:
        lines = [connect(this) for _ in range(2)]
        found = [reported(line, 4) for line in reversed(lines)]
        for line in lines:
            line.close()
        return found

    with ThreadPoolExecutor(4) as threads:
        for rank, found in enumerate(threads.map(run, endpoints)):
            assert found == [[float(peer) for peer in range(4) if peer != rank]] * 2


def test_no_line_without_rank_0(endpoints: list[OnThread]) -> None:
    leave(endpoints[0])
    with pytest.raises(ExchangeError, match=r"rank 2 cannot connect to the others: rank 0 is gone"):
        connect(endpoints[2])


def test_a_late_rank_0_is_named_after_the_deadline(endpoints: list[OnThread]) -> None:
    endpoints[2].wait_limit = 0.1
    with pytest.raises(ExchangeError, match=r"rank 2 cannot connect.*rank 0 has not connected within 0.1 s"):
        connect(endpoints[2])


def test_rank_0_names_who_has_gone(endpoints: list[OnThread]) -> None:
    leave(endpoints[3])
    with pytest.raises(ExchangeError, match=r"rank 0 cannot connect to the others: rank 3 is gone"):
        connect(endpoints[0])


def test_a_rank_that_does_not_connect_is_missed_at_once(endpoints: list[OnThread]) -> None:
    """Later it would take for its own what was meant for this connection, and hear nobody."""
    for this in endpoints:
        this.wait_limit = 0.5
    with ThreadPoolExecutor(4) as threads:
        tried = [threads.submit(connect, this) for this in endpoints if this.rank != 2]
        message = [str(each.exception()) for each in tried]
    for rank, sentence in zip([0, 1, 3], message, strict=True):
        assert f"rank {rank} cannot connect to the others: rank 2 has not connected within 0.5 s" in sentence


def test_more_descriptors_under_way_than_the_kernel_lets_wait(
    endpoints: list[OnThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts those of all processes of a user that nobody has taken yet."""
    send, refusals = socket.send_fds, iter([True, False, True, True])

    def send_sometimes(*args: Any) -> int:
        if next(refusals, False):
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return send(*args)

    monkeypatch.setattr(socket, "send_fds", send_sometimes)
    with ThreadPoolExecutor(4) as threads:
        lines = list(threads.map(connect, endpoints))
        assert list(threads.map(reported, lines, [4] * 4))[3] == [0.0, 1.0, 2.0]
    assert next(refusals, None) is None, "three were refused"
    for line in lines:
        line.close()


def test_shared_memory_is_for_one_host() -> None:
    with pytest.raises(ExchangeError, match="all ranks on one host"):
        connect(OnThread(0, 2, None), through="shared_memory")


def test_ranks_connect_as_they_are_needed(endpoints: list[OnThread]) -> None:
    """Two pairs, then three, then all: nobody waits for a rank that takes no part."""
    found: dict[int, Transport] = {}

    def run(this: OnThread, ranks: tuple[int, ...]) -> list[float]:
        if this.rank not in found:
            found[this.rank] = connect(this, ranks=ranks)
        else:
            assert not extend(found[this.rank], this, ranks)
        return reported(found[this.rank], 4, ranks)

    with ThreadPoolExecutor(4) as threads:
        for ranks in [(0, 1), (3, 2), (2, 0, 1), (0, 1, 2, 3), (1, 3)]:
            heard = threads.map(run, [endpoints[rank] for rank in ranks], [ranks] * 4)
            assert list(heard) == [[float(peer) for peer in ranks if peer != rank] for rank in ranks]
    for transport in found.values():
        transport.close()


@pytest.mark.parametrize("renewed", [True, False])
def test_what_was_left_in_a_link_is_lost_with_it(endpoints: list[OnThread], renewed: bool) -> None:
    """Rank 1 sends a message that rank 0 does not read; both then get another link, and neither reads the old one.

    Without another link rank 0 takes it for the next one.
    """
    pair, own = endpoints[:2], torch.tensor([7.0])

    def go_on(this: OnThread, line: Transport) -> tuple[bool, list[float]]:
        return extend(line, this, (0, 1)), reported(line, 2)

    with ThreadPoolExecutor(2) as threads:
        lines = list(threads.map(lambda this: connect(this, ranks=(0, 1)), pair))
        lines[1].send_recv([Outgoing((0,), (own,))], [], "left over").wait()
        if renewed:
            early = lines[0].send_recv([], [Incoming(1, (TensorSpec.of(own),))], "never waited for")
            renew(pair)
        found = list(threads.map(go_on, pair, lines))
    assert found == [(renewed, [1.0 if renewed else 7.0]), (renewed, [0.0])]
    if renewed:
        with pytest.raises(ExchangeError, match="rank 1 is gone"):
            early.wait()
    for line in lines:
        line.close()


def test_ranks_that_could_exchange_no_more_go_on_over_another_link(endpoints: list[OnThread]) -> None:
    pair = endpoints[:2]
    with ThreadPoolExecutor(2) as threads:
        lines = list(threads.map(lambda this: connect(this, ranks=(0, 1)), pair))
        for line in lines:
            line.poison("rank 1 was late")
        assert list(threads.map(lambda line, this: extend(line, this, (0, 1)), lines, pair)) == [False] * 2
        with pytest.raises(ExchangeError, match="rank 1 was late"):
            lines[0].check("here")
        renew(pair)
        assert list(threads.map(lambda line, this: extend(line, this, (0, 1)), lines, pair)) == [True] * 2
        assert list(threads.map(reported, lines, [2] * 2)) == [[1.0], [0.0]]
    for line in lines:
        line.close()


def test_links_of_devices_end_with_the_connection_of_their_ranks(endpoints: list[OnThread]) -> None:
    """What was in flight in them is lost, and a rank that has been started anew has none of them."""
    pair = endpoints[:2]
    with ThreadPoolExecutor(2) as threads:
        hosts = list(threads.map(lambda this: connect(this, ranks=(0, 1)), pair))
        lines = [LinkTransport(host, "gloo", str(host.rank)) for host in hosts]
        for line in lines:
            line.has_formed = True
        renew(pair)
        assert list(threads.map(lambda line, this: extend(line, this, (0, 1)), lines, pair)) == [True] * 2
    for line in lines:
        assert not line.has_formed
        with pytest.raises(ExchangeError, match="a connection to another rank had ended"):
            line.check("here")
        line.close()


class MadeLink:
    """A link whose socket is there; without one, of a rank that is gone."""

    def __init__(self, line: socket.socket | None) -> None:
        self.line = line

    def offer(self, give_up: float) -> socket.socket:
        if self.line is None:
            raise ConnectionResetError("it has closed the connection")
        return self.line


def test_ranks_that_have_connected_hear_at_once_that_another_has_not() -> None:
    ours, theirs = socket.socketpair()
    links: Any = {1: MadeLink(ours), 2: MadeLink(None)}
    with theirs, pytest.raises(ExchangeError, match="rank 2 is gone"):
        connect(OnThread(0, 3, links))
    assert ours.fileno() == -1


def renew(pair: list[OnThread]) -> None:
    """Give two ranks another link."""
    links = [dict(this.links or {}) for this in pair]
    for own, peer in [(0, 1), (1, 0)]:
        links[own][peer].shut()
    link(links, 0, 1)
    for this, own_links in zip(pair, links, strict=True):
        this.links = own_links
