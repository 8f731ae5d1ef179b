"""A link slower than the one there is: what it brings is what was sent, and no earlier than it could."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import DelayedTransport, Incoming, Outgoing, TensorSpec, Transport
from patchpar.errors import ExchangeError, PlanError
from patchpar.plan.mesh import Mesh
from tests.unit.threads import on_threads

LATENCY, RATE = 0.02, 1e6
NUMBERS = (1.0, 2.0, 3.0)
GENEROUS = 5.0  # seconds that only a machine which has come to a standstill takes


def behind(latency: float, rate: float, function: Callable[[DelayedTransport], Any], **options: Any) -> list[Any]:
    """What `function` returns on each rank, all with delayed transports. They are connected when they start."""
    world, deadline = options.pop("world", 2), options.pop("deadline", 10.0)

    def run(inner: Transport) -> Any:
        return function(DelayedTransport(inner, latency=latency, rate=rate, **options))

    found = on_threads(world, run, deadline=deadline)
    for each in found:
        if isinstance(each, AssertionError):
            raise each
    return found


def outgoing(line: DelayedTransport, num_bytes: Sequence[int]) -> list[Outgoing]:
    return [Outgoing((1 - line.rank,), (torch.zeros(size, dtype=torch.uint8),)) for size in num_bytes]


def incoming(line: DelayedTransport, num_bytes: Sequence[int]) -> list[Incoming]:
    return [Incoming(1 - line.rank, (TensorSpec((size,), torch.uint8),)) for size in num_bytes]


def arrivals(latency: float, rate: float, num_bytes: Sequence[int], **options: Any) -> list[list[float]]:
    """For each rank, seconds from when the other sent until each of several messages was here; both send all."""

    def run(line: DelayedTransport) -> tuple[float, list[float]]:
        start = time.monotonic()
        pending = line.send_recv(outgoing(line, num_bytes), incoming(line, num_bytes), "here")
        times = []
        for index in range(len(num_bytes)):
            pending.wait_for(index)
            times.append(time.monotonic())
        return start, times

    (start_0, times_0), (start_1, times_1) = behind(latency, rate, run, **options)
    return [[at - start_1 for at in times_0], [at - start_0 for at in times_1]]


def test_values_and_order_are_untouched() -> None:
    def run(line: DelayedTransport) -> Any:
        peer = 1 - line.rank
        messages = [Outgoing((peer,), (torch.full((2, 3), x).T, torch.tensor(x).half())) for x in NUMBERS]
        specs = (TensorSpec((3, 2), torch.float32), TensorSpec((), torch.float16))
        pending = line.send_recv(messages, [Incoming(peer, specs)] * 3, "here")
        last = pending.wait_for(2)  # awaited first
        received = pending.wait()
        assert torch.equal(last[0], received[2][0])
        return [(rows.unique().tolist(), one.item()) for rows, one in received]

    assert behind(0.001, 1e6, run) == [[([x], x) for x in NUMBERS]] * 2


def test_values_come_where_they_are_wanted() -> None:
    def run(line: DelayedTransport) -> bool:
        peer, wanted = 1 - line.rank, torch.zeros(4)
        message = Incoming(peer, (TensorSpec.of(wanted),), (wanted,))
        ((got,),) = line.send_recv([Outgoing((peer,), (torch.ones(4),))], [message], "here").wait()
        return bool(got is wanted and (wanted == 1).all())

    assert behind(0.001, 1e6, run) == [True, True]


def test_a_message_takes_latency_and_its_bytes_at_the_rate() -> None:
    size = 50_000
    for (waited,) in arrivals(LATENCY, RATE, [size]):
        assert LATENCY + size / RATE <= waited < GENEROUS


def test_without_latency_and_limit_nothing_is_waited_for() -> None:
    for (waited,) in arrivals(0.0, math.inf, [1 << 20]):
        assert waited < GENEROUS / 10


def test_two_messages_share_the_link_but_not_the_latency() -> None:
    """The second leaves when the first has left: bytes add up, latency does not."""
    for times in arrivals(0.3, RATE, [50_000, 30_000]):
        assert times[0] >= 0.3 + 0.05
        assert 0.3 + 0.08 <= times[1] < 0.3 + 0.08 + 0.25


def test_a_message_to_two_ranks_leaves_twice() -> None:
    def run(line: DelayedTransport) -> float:
        spec = TensorSpec((50_000,), torch.uint8)
        start = time.monotonic()
        if line.rank:
            line.send_recv([], [Incoming(0, (spec,))], "here").wait()
            return time.monotonic()
        line.send_recv([Outgoing((1, 2), (torch.zeros(*spec.shape, dtype=spec.dtype),))], [], "here").wait()
        return start

    sent, first, second = behind(0.0, RATE, run, world=3)
    assert first - sent >= 0.05
    assert second - sent >= 0.1


def test_what_has_arrived_meanwhile_costs_nothing() -> None:
    def run(line: DelayedTransport) -> float:
        pending = line.send_recv(outgoing(line, [1000]), incoming(line, [1000]), "here")
        time.sleep(0.6)
        start = time.monotonic()
        pending.wait()
        return time.monotonic() - start

    assert max(behind(0.3, RATE, run)) < 0.3


def test_what_the_link_still_has_is_not_here() -> None:
    def run(line: DelayedTransport) -> tuple[bool, bool, float]:
        start = time.monotonic()
        pending = line.send_recv(outgoing(line, [1000]), incoming(line, [1000]), "here")
        at_first = pending.is_here(0)
        while not pending.is_here(0):
            time.sleep(0.001)
        took = time.monotonic() - start
        pending.wait()
        return at_first, pending.is_here(0), took

    for at_first, at_last, took in behind(0.5, RATE, run):
        assert (at_first, at_last, took > 0.4) == (False, True, True)


def test_small_messages_overtake_large_ones_only_where_they_may() -> None:
    def run(line: DelayedTransport) -> float:
        pending = line.send_recv(outgoing(line, [400_000, 1000]), incoming(line, [400_000, 1000]), "here")
        start = time.monotonic()  # the other rank has sent a little earlier at most
        pending.wait_for(1)
        small = time.monotonic() - start
        pending.wait_for(0)
        assert time.monotonic() - start >= 0.2
        return small

    assert max(behind(0.0, RATE, run, overtake=1000)) < 0.2
    assert min(behind(0.0, RATE, run)) >= 0.2
    assert min(behind(0.0, RATE, run, overtake=999)) >= 0.2


def test_what_overtakes_takes_its_share_of_the_link() -> None:
    for times in arrivals(0.0, RATE, [50_000, 200_000], overtake=100_000):
        assert times[1] >= 0.25


def test_the_link_may_change_between_exchanges() -> None:
    def run(line: DelayedTransport) -> float:
        line.latency = 0.2
        start = time.monotonic()
        line.send_recv(outgoing(line, [1]), incoming(line, [1]), "here").wait()
        return time.monotonic() - start

    assert min(behind(0.0, math.inf, run)) >= 0.1, "ranks start within 100 ms of each other"


def test_a_message_slower_than_the_deadline_names_the_exchange_point_and_the_way_out() -> None:
    def run(line: DelayedTransport) -> float:
        start = time.monotonic()
        with pytest.raises(ExchangeError, match=r"rank . at here: the link of 1e\+06 bytes/s and 60 s .*rank . .*4,"):
            line.send_recv(outgoing(line, [4]), incoming(line, [4]), "here").wait()
        return time.monotonic() - start

    for waited in behind(60.0, RATE, run, deadline=0.3):
        assert isinstance(waited, float), waited
        assert 0.3 <= waited < GENEROUS


def test_a_silent_peer_is_named_as_ever() -> None:
    def run(line: DelayedTransport) -> str:
        if line.rank:
            return ""
        with pytest.raises(ExchangeError) as error:
            line.send_recv([], incoming(line, [4]), "conv_in").wait()
        return str(error.value)

    message, _ = behind(0.0, RATE, run, deadline=0.3)
    assert re.search("rank 0 at conv_in: rank 1 has not answered", message)


def test_the_deadline_is_that_of_the_transport_inside() -> None:
    def run(line: DelayedTransport) -> float:
        line.deadline = 33.0
        return line.inner.deadline

    assert behind(0.0, RATE, run) == [33.0, 33.0]


@pytest.mark.parametrize(
    ("latency", "rate"), [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0), (0.0, -1.0), (0.0, math.nan)]
)
def test_a_link_that_cannot_be(latency: float, rate: float) -> None:
    with pytest.raises(PlanError, match="latency >= 0 and a rate > 0"):
        behind_one(latency, rate)


def behind_one(latency: float, rate: float) -> None:
    (error,) = on_threads(1, lambda inner: DelayedTransport(inner, latency=latency, rate=rate))
    raise error


def test_stamps_are_not_counted() -> None:
    def run(line: DelayedTransport) -> int:
        comm = Communicator(line)
        axis = Mesh(line.rank, range(2), patch=2)["patch"]
        AllGather(comm, axis, "kv", "here").same(torch.zeros(5))
        return comm.traffic.total_bytes

    assert behind(0.0, math.inf, run) == [20, 20]
