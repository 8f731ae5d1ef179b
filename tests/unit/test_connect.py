"""How ranks of one host get a line each to every other, through links that lead to rank 0."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, Transport, connect
from patchpar.errors import ExchangeError
from patchpar.launch.channel import SocketPairs, inherited


@dataclass
class OnThread:
    """A rank that is a thread of this process."""

    rank: int
    world_size: int
    links: Mapping[int, socket.socket] | None
    device: str = "cpu"
    wait_limit: float = 20.0
    waiting: AbstractContextManager[None] = field(default_factory=nullcontext)


def made(world: int) -> list[OnThread]:
    links = SocketPairs(world)
    ends = [
        {peer: socket.fromfd(end, socket.AF_UNIX, socket.SOCK_STREAM) for peer, end in links.of(rank).items()}
        for rank in range(world)
    ]
    links.close()
    return [OnThread(rank, world, own) for rank, own in enumerate(ends)]


@pytest.fixture
def endpoints() -> Iterator[list[OnThread]]:
    found = made(4)
    yield found
    for this in found:
        leave(this)


def leave(this: OnThread) -> None:
    for link in (this.links or {}).values():
        link.close()


def told(transport: Transport, world: int) -> list[float]:
    """What every other rank sends to this one."""
    others = tuple(rank for rank in range(world) if rank != transport.rank)
    own = torch.tensor([float(transport.rank)])
    incoming = [Incoming(rank, (TensorSpec.of(own),)) for rank in others]
    return [x.item() for (x,) in transport.send_recv([Outgoing(others, (own,))], incoming, "here").wait()]


def test_every_rank_gets_a_line_to_every_other_as_often_as_it_asks(endpoints: list[OnThread]) -> None:
    def run(this: OnThread) -> list[list[float]]:
        lines = [connect(this) for _ in range(2)]
        found = [told(line, 4) for line in reversed(lines)]
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
    with pytest.raises(ExchangeError, match=r"rank 2 cannot connect.*rank 0 has not answered for 0.1 s"):
        connect(endpoints[2])


def test_rank_0_names_who_has_gone(endpoints: list[OnThread]) -> None:
    leave(endpoints[3])
    with pytest.raises(ExchangeError, match=r"rank 0 cannot connect the ranks: rank 3 is gone"):
        connect(endpoints[0])


def test_a_rank_that_does_not_connect_is_missed_at_once(endpoints: list[OnThread]) -> None:
    """Later it would take for its own what was meant for this connection, and hear nobody."""
    for this in endpoints:
        this.wait_limit = 0.5
    with ThreadPoolExecutor(4) as threads:
        tried = [threads.submit(connect, this) for this in endpoints if this.rank != 2]
        said = [str(each.exception()) for each in tried]
    for rank, sentence in zip([0, 1, 3], said, strict=True):
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
        assert list(threads.map(told, lines, [4] * 4))[3] == [0.0, 1.0, 2.0]
    for line in lines:
        line.close()


def test_shared_memory_is_for_one_host() -> None:
    with pytest.raises(ExchangeError, match="all ranks on one host"):
        connect(OnThread(0, 2, None), through="shared_memory")


def test_what_is_inherited_goes_no_further() -> None:
    links = SocketPairs(2)
    own = inherited(links.of(1))
    assert not any(link.get_inheritable() for link in own.values())
    for link in own.values():
        link.detach()
    links.close()
