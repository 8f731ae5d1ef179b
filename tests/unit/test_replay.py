"""The replay of tapes obeys the laws of pipelines, rings and gathers, and names the ranks of a deadlock."""

from __future__ import annotations

import pytest

from patchpar.errors import PlanError
from patchpar.plan.replay.replay import Deadlock, replay
from patchpar.plan.replay.tape import Boundary, Kernel, Send, Tape, Wait
from patchpar.plan.replay.topology import Resource, Route, Topology, equal_ports


def ring(ranks: int, rank: int, rounds: int, seconds: float, num_bytes: int) -> Tape:
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    return tuple(
        entry
        for number in range(rounds)
        for entry in (
            Send(number, (after,), "kv", num_bytes),
            Kernel("attention", seconds),
            Wait(number, before, num_bytes),
        )
    )


def pipeline(stages: int, stage: int, parts: int, steps: int, seconds: float) -> Tape:
    entries: list[Kernel | Send | Wait | Boundary] = []
    for step in range(steps):
        entries.append(Boundary(f"step {step}"))
        for number in range(step * parts, (step + 1) * parts):
            if stage:
                entries.append(Wait(number, stage - 1, 1))
            elif step:
                entries.append(Wait(number - parts, stages - 1, 1))
            entries.append(Kernel("stage", seconds / parts))
            entries.append(Send(number, ((stage + 1) % stages,), "hidden", 1))
    return tuple(entries)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("size", [0, 50, 100, 300])
def test_a_round_of_a_ring_takes_the_longer_of_computing_and_sending(ranks: int, size: int) -> None:
    found = replay([ring(ranks, rank, 5, 1.0, size) for rank in range(ranks)], equal_ports(100.0))
    assert found.seconds == pytest.approx(5 * max(1.0, size / 100))


@pytest.mark.parametrize(("stages", "parts"), [(2, 2), (4, 4), (4, 5), (4, 8), (8, 10)])
@pytest.mark.parametrize("latency", [0.0, 0.002, 0.02])
def test_a_step_of_a_pipeline_takes_the_longer_of_its_work_and_its_round_trip(
    stages: int, parts: int, latency: float
) -> None:
    def seconds(steps: int) -> float:
        tapes = [pipeline(stages, stage, parts, steps, 0.1) for stage in range(stages)]
        return replay(tapes, equal_ports(1e12, latency)).seconds

    law = max(0.1, stages * (0.1 / parts + latency))
    assert (seconds(40) - seconds(20)) / 20 == pytest.approx(law, rel=1e-6)


def test_messages_share_a_resource_in_the_order_they_are_sent() -> None:
    bus = Route((Resource("bus", 10.0),), 0.5)
    tapes: list[Tape] = [(Send(0, (2,), "kv", 20),), (Send(0, (2,), "kv", 10),), (Wait(0, 0, 20), Wait(0, 1, 10))]
    found = replay(tapes, Topology(lambda a, b: bus))
    assert found.ends == (0.0, 0.0, 3.5)
    assert found.waited[2] == 3.5


@pytest.mark.parametrize(("both_ways", "seconds"), [(200.0, 1.0), (100.0, 2.0), (125.0, 1.6), (1000.0, 1.0)])
def test_two_messages_pass_a_resource_at_once_as_far_as_it_is_faster_than_their_ports(
    both_ways: float, seconds: float
) -> None:
    """Two ranks send 100 bytes to each other through one memory, from and to ports of 100 bytes/s."""

    def path(a: int, b: int) -> Route:
        return Route((Resource(f"out {a}", 100.0), Resource("memory", both_ways), Resource(f"in {b}", 100.0)))

    tapes: list[Tape] = [(Send(0, (1 - rank,), "kv", 100), Wait(0, 1 - rank, 100)) for rank in range(2)]
    assert max(replay(tapes, Topology(path)).ends) == pytest.approx(seconds)


def test_a_stale_value_that_came_meanwhile_costs_nothing() -> None:
    tapes: list[Tape] = [
        (Send(0, (1 - rank,), "kv", 50), Kernel("block", 1.0), Wait(0, 1 - rank, 50)) for rank in range(2)
    ]
    assert replay(tapes, equal_ports(100.0)).waited == (0.0, 0.0)


def test_a_deadlock_names_ranks_and_exchange_points() -> None:
    tapes: list[Tape] = [
        (Wait(0, 1, 8, "down.0"), Send(0, (1,), "halo", 8)),
        (Wait(0, 0, 8, "up.1"), Send(0, (0,), "halo", 8)),
    ]
    with pytest.raises(Deadlock, match=r"rank 0 waits at down\.0 .* of rank 1; rank 1 waits at up\.1 .* of rank 0"):
        replay(tapes, equal_ports(1.0))
    replay([tuple(reversed(tape)) for tape in tapes], equal_ports(1.0))


def test_a_peer_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 0 sends to rank 3 of 1"):
        replay([(Send(0, (3,), "kv", 8),)], equal_ports(1.0))


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (float("nan"), 0.0), (1.0, -1.0), (1.0, float("inf"))])
def test_links_that_cannot_be_are_refused(rate: float, latency: float) -> None:
    with pytest.raises(PlanError, match="use a"):
        equal_ports(rate, latency).path(0, 1)


@pytest.mark.parametrize("copy", [0.25, 1.0, 3.0])
def test_copies_of_the_next_block_are_hidden_behind_this_one(copy: float) -> None:
    """Each block takes the longer of its own computation and of the copy of the next one, as in docs/weights.md."""
    tape: list[Kernel | Send | Wait] = [Send(0, (0,), "host", 100, bulk=True)]
    for block in range(5):
        tape.append(Wait(block, 0, 100, f"block {block}", "host"))
        if block < 4:
            tape.append(Send(block + 1, (0,), "host", 100, bulk=True))
        tape.append(Kernel("block", 1.0))
    host = Topology(lambda a, b: Route((Resource(f"from host {b}", 100 / copy),)))
    assert replay([tuple(tape)], host).seconds == pytest.approx(copy + 4 * max(1.0, copy) + 1.0)
