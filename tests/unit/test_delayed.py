"""A link slower than the one there is: what it brings is what was sent, and no earlier than it could."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import DelayedTransport, Incoming, Outgoing, TensorSpec, Transport, delayed
from patchpar.errors import ExchangeError, PlanError
from patchpar.plan.mesh import Mesh
from tests.clock import Clock
from tests.unit.threads import on_threads

LATENCY, RATE = 0.02, 1e6
NUMBERS = (1.0, 2.0, 3.0)


CLOCK = Clock()
by_clock = pytest.mark.usefixtures("clock")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed, "time", CLOCK)


def seconds(wanted: float) -> Any:
    """Exactly so many, but for the nanosecond to which a time of arrival is rounded."""
    return pytest.approx(wanted, abs=1e-6)


def behind(latency: float, rate: float, function: Callable[[DelayedTransport], Any], **options: Any) -> list[Any]:
    """What `function` returns on each rank, all with delayed transports. They are connected when they start."""
    world, deadline = options.pop("world", 2), options.pop("deadline", 10.0)

    def run(inner: Transport) -> Any:
        CLOCK.now = 0.0
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
    """For each rank, when each of several messages was here by its clock; both send all at 0."""

    def run(line: DelayedTransport) -> list[float]:
        pending = line.send_recv(outgoing(line, num_bytes), incoming(line, num_bytes), "here")
        times = []
        for index in range(len(num_bytes)):
            pending.wait_for(index)
            times.append(CLOCK.now)
        return times

    return behind(latency, rate, run, **options)


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


def test_a_wait_is_for_what_is_sent_too() -> None:
    """Over gloo a rank that drops the handle of a message may keep it from its receiver."""

    def run(line: DelayedTransport) -> bool:
        pending = line.send_recv(outgoing(line, [4]), incoming(line, [4]), "here")
        inner = pending._pending
        with patch.object(inner, "wait", wraps=inner.wait) as waited:
            pending.wait()
        return waited.called

    assert behind(0.0, math.inf, run) == [True, True]


@by_clock
def test_a_message_takes_latency_and_its_bytes_at_the_rate() -> None:
    assert arrivals(LATENCY, RATE, [50_000]) == [[seconds(LATENCY + 0.05)]] * 2


def test_it_takes_them_by_the_clock_of_the_host() -> None:
    """The others here are by a clock of their own, on which nothing but the link takes time."""

    def run(line: DelayedTransport) -> float:
        start = time.monotonic()
        line.send_recv(outgoing(line, [50_000]), incoming(line, [50_000]), "here").wait()
        return time.monotonic() - start

    start = time.monotonic()
    first, second = behind(LATENCY, RATE, run)
    assert max(first, second) >= LATENCY + 0.05, "the one that began first"
    assert time.monotonic() - start >= LATENCY + 0.05


@by_clock
def test_without_latency_and_limit_nothing_is_waited_for() -> None:
    assert arrivals(0.0, math.inf, [1 << 20]) == [[seconds(0)]] * 2


@by_clock
def test_two_messages_share_the_link_but_not_the_latency() -> None:
    """The second leaves when the first has left: bytes add up, latency does not."""
    assert arrivals(0.3, RATE, [50_000, 30_000]) == [[seconds(0.35), seconds(0.38)]] * 2


@by_clock
def test_a_message_to_two_ranks_leaves_twice() -> None:
    def run(line: DelayedTransport) -> float:
        spec = TensorSpec((50_000,), torch.uint8)
        if line.rank:
            line.send_recv([], [Incoming(0, (spec,))], "here").wait()
        else:
            line.send_recv([Outgoing((1, 2), (torch.zeros(*spec.shape, dtype=spec.dtype),))], [], "here").wait()
        return CLOCK.now

    assert behind(0.0, RATE, run, world=3) == [0.0, seconds(0.05), seconds(0.1)]


@by_clock
def test_what_has_arrived_meanwhile_costs_nothing() -> None:
    def run(line: DelayedTransport) -> float:
        pending = line.send_recv(outgoing(line, [1000]), incoming(line, [1000]), "here")
        CLOCK.sleep(0.6)
        pending.wait()
        return CLOCK.now

    assert behind(0.3, RATE, run) == [0.6, 0.6]


@by_clock
def test_small_messages_overtake_large_ones_only_where_they_may() -> None:
    def run(line: DelayedTransport) -> list[float]:
        pending = line.send_recv(outgoing(line, [400_000, 1000]), incoming(line, [400_000, 1000]), "here")
        times = []
        for index in (1, 0):
            pending.wait_for(index)
            times.append(CLOCK.now)
        return times

    assert behind(0.0, RATE, run, overtake=1000) == [[seconds(0.001), seconds(0.4)]] * 2
    for overtake in (0, 999):
        assert behind(0.0, RATE, run, overtake=overtake) == [[seconds(0.401)] * 2] * 2


@by_clock
def test_what_overtakes_takes_its_share_of_the_link() -> None:
    assert arrivals(0.0, RATE, [50_000, 200_000], overtake=100_000) == [[seconds(0.05), seconds(0.25)]] * 2
    assert arrivals(0.0, RATE, [50_000, 30_000], overtake=100_000) == [[seconds(0.05), seconds(0.08)]] * 2


@by_clock
def test_the_link_may_change_between_exchanges() -> None:
    def run(line: DelayedTransport) -> list[float]:
        times = []
        for latency in (0.2, 0.3):
            line.latency = latency
            line.send_recv(outgoing(line, [1]), incoming(line, [1]), "here").wait()
            times.append(CLOCK.now)
        return times

    assert behind(0.0, math.inf, run) == [[seconds(0.2), seconds(0.5)]] * 2


@by_clock
def test_a_message_slower_than_the_deadline_names_the_exchange_point_and_the_way_out() -> None:
    def run(line: DelayedTransport) -> float:
        with pytest.raises(ExchangeError, match=r"rank . at here: the link of 1e\+06 bytes/s and 60 s .*rank . .*4,"):
            line.send_recv(outgoing(line, [4]), incoming(line, [4]), "here").wait()
        return CLOCK.now

    assert behind(60.0, RATE, run, deadline=10.0) == [10.0, 10.0]


def test_a_silent_peer_is_named_as_ever() -> None:
    def run(line: DelayedTransport) -> str:
        if line.rank:
            return ""
        with pytest.raises(ExchangeError) as error:
            line.send_recv([], incoming(line, [4]), "conv_in").wait()
        return str(error.value)

    message, _ = behind(0.0, RATE, run, deadline=0.3)
    assert re.search("rank 0 at conv_in: rank 1 has not answered", message), message


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
