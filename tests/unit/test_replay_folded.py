"""The replay equals one by brute force, obeys launches where they take longest, and runs equal groups once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from patchpar.errors import PlanError
from patchpar.plan.replay import fold
from patchpar.plan.replay.chrome_trace import write_chrome_trace
from patchpar.plan.replay.fold import replay_groups
from patchpar.plan.replay.replay import LAUNCH, STEP, replay
from patchpar.plan.replay.tape import (
    Boundary,
    Kernel,
    Leave,
    Operator,
    Receive,
    Send,
    Tape,
    TapeEntry,
    Wait,
    bytes_sent,
    steps_of,
)
from patchpar.plan.replay.topology import Resource, Route, Topology, equal_ports
from tests.unit.replay_oracle import ends_by_brute_force


def schedule(seed: int, ranks: int, rounds: int) -> list[Tape]:
    """Random programs: each round computes, sends to some others, and waits for what an earlier round has sent.

    In some rounds this is an operation of all.
    """
    choice = random.Random(seed)
    tapes: list[list[TapeEntry]] = [[] for _ in range(ranks)]
    for number in range(rounds):
        senders = {rank: choice.sample(range(ranks), choice.randint(0, ranks)) for rank in range(ranks)}
        operation = 1 + number if choice.random() < 0.5 else 0
        for rank, tape in enumerate(tapes):
            host, waits = choice.choice([0.0, choice.random()]), choice.random() < 0.2
            tape.append(Kernel("block", choice.random(), host, waits=waits))
            peers = tuple(peer for peer in senders[rank] if peer != rank)
            if peers:
                size, bulk = choice.randint(0, 50), choice.random() < 0.3
                tape.append(Send(number, peers, "kv", size, bulk=bulk, operation=operation))
            tape += [Receive(number, sender) for sender, to in senders.items() if rank in to and sender != rank]
            tape.append(Kernel("block", choice.random()))
        for rank, tape in enumerate(tapes):
            waits = [Wait(number, sender, 0) for sender, peers in senders.items() if rank in peers and sender != rank]
            choice.shuffle(waits)
            tape += [*waits, Leave(1 + number)]
    return [tuple(tape) for tape in tapes]


def hosts_of(size: int, card: float) -> Topology:
    """Hosts of so many ranks, each with a port, and one network card for both directions."""

    def path(a: int, b: int) -> Route:
        ends = Resource(f"out {a}", 90.0), Resource(f"in {b}", 70.0)
        if a // size == b // size:
            return Route(ends, 0.01)
        cards = [Resource(f"card {host}", card) for host in dict.fromkeys((a // size, b // size))]
        return Route((ends[0], *cards, ends[1]), 0.2)

    return Topology(path)


@pytest.mark.parametrize("seed", range(12))
def test_a_replay_is_that_by_brute_force(seed: int) -> None:
    tapes, topology = schedule(seed, 2 + seed % 4, 6), hosts_of(2, 40.0)
    found = replay(tapes, topology)
    assert list(found.ends) == pytest.approx(ends_by_brute_force(tapes, topology), rel=1e-9)
    faster = replay(tapes, hosts_of(2, 400.0))
    assert faster.seconds <= found.seconds + 1e-9


def test_a_device_waits_for_launches_that_take_longer_than_its_kernels() -> None:
    tape = tuple(Kernel("norm", 1.0, 3.0) for _ in range(5))
    found = replay([tape], equal_ports(1.0))
    assert found.seconds == 5 * 3.0 + 1.0
    assert sum(each.seconds for each in found.intervals if each.what == LAUNCH) == 11.0


@pytest.mark.parametrize("seed", range(5))
def test_kernels_as_one_take_the_same_time(seed: int) -> None:
    choice = random.Random(seed)
    kernels = [Kernel("k", choice.random(), choice.random()) for _ in range(20)]
    one = kernels[0]
    for each in kernels[1:]:
        one = one.then(each)
    before = (Kernel("before", choice.choice([0.0, 5.0]), choice.choice([0.0, 5.0])),)
    apart, joined = (replay([tape], equal_ports(1.0)) for tape in ((*before, *kernels), (*before, one)))
    assert joined.seconds == pytest.approx(apart.seconds)


def test_an_operator_without_a_price_is_refused() -> None:
    with pytest.raises(PlanError, match=r"mm of rank 0 has no price"):
        replay([(Operator("mm", "float16", 8, 8, (2, 2, 1)),)], equal_ports(1.0))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_folded_groups_take_as_long_as_all_ranks(groups: int) -> None:
    """Three ranks each on hosts of six: two groups share a card, through which each sends to nobody."""
    tapes = schedule(3, 3, 5)
    topology = hosts_of(6, 40.0)
    all_ranks = [tuple(fold._shifted(entry, 3 * group) for entry in tape) for group in range(groups) for tape in tapes]
    folded = replay_groups(tapes, groups, topology)
    assert folded.seconds == replay(all_ranks, topology).seconds
    assert sum(count for count, _ in folded.found) == groups


def test_groups_that_share_a_network_card_are_replayed_together() -> None:
    """Groups of two across hosts of one: ranks 0, 1 on hosts 0, 1, and so on; one card joins all."""
    card = Resource("switch", 10.0)
    topology = Topology(lambda a, b: Route((card,)))
    tapes: list[Tape] = [(Send(0, (1 - rank,), "kv", 10), Wait(0, 1 - rank, 10)) for rank in range(2)]
    assert replay_groups(tapes, 5, topology).seconds == 10.0
    with_ports = Topology(lambda a, b: Route((Resource(f"out {a}", 10.0), Resource("switch", 1000.0))))
    all_ranks = [fold.moved(tape, 2 * group) for group in range(5) for tape in tapes]
    assert replay_groups(tapes, 5, with_ports).seconds == replay(all_ranks, with_ports).seconds
    assert len(replay_groups(tapes, 5, equal_ports(10.0)).found) == 1


@pytest.mark.parametrize(
    ("rate", "latency", "cable"), [(10.0, 1.0, "{a}"), (5.0, 0.0, "{a}"), (10.0, 0.0, "both ways")]
)
def test_a_group_with_slower_links_is_replayed_by_itself(rate: float, latency: float, cable: str) -> None:
    """Of two groups of two ranks the second has more latency, less rate, or one cable for both directions."""

    def path(a: int, b: int) -> Route:
        return Route((Resource(f"{a}", 10.0),)) if a < 2 else Route((Resource(cable.format(a=a), rate),), latency)

    tapes: list[Tape] = [(Send(0, (1 - rank,), "kv", 10), Wait(0, 1 - rank, 10)) for rank in range(2)]
    found = replay_groups(tapes, 2, Topology(path))
    assert [(count, each.seconds) for count, each in found.found] == [(1, 1.0), (1, 2.0)]
    assert found.slowest.seconds == found.seconds == 2.0


def test_a_thousand_devices_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    monkeypatch.setattr(fold, "replay", lambda *given: replays.append(1) or replay(*given))
    found = replay_groups(schedule(1, 8, 10), 125, equal_ports(50.0))
    assert len(replays) == 1
    assert [count for count, _ in found.found] == [125]


def test_a_message_to_another_group_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 0 of a group of 1 sends to rank 1"):
        replay_groups([(Send(0, (1,), "kv", 1),)], 2, equal_ports(1.0))


def test_steps_of_a_tape_and_its_bytes_by_kind() -> None:
    tape: Tape = (
        Boundary("step 0", is_step=True),
        Send(0, (1, 2), "moments+halo", 30, parts=(("moments", 10), ("halo", 20))),
        Boundary("block"),
        Boundary("step 1", is_step=True),
        Send(1, (1,), "kv", 5),
    )
    assert bytes_sent(tape) == {"moments": 20, "halo": 40, "kv": 5}
    assert bytes_sent(steps_of(tape)["step 1"]) == {"kv": 5}


def test_a_trace_has_all_ranks_and_steps(tmp_path: Path) -> None:
    tapes: list[Tape] = [
        (
            Boundary("step 0", is_step=True),
            Send(0, (1 - rank,), "kv", 100),
            Kernel("block", 1.0),
            Wait(0, 1 - rank, 100),
        )
        for rank in range(2)
    ]
    found = replay(tapes, equal_ports(50.0))
    assert [each.seconds for each in found.intervals if each.what == STEP] == [2.0, 2.0]
    write_chrome_trace(tmp_path / "trace.json", found)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["name"] for event in events if event["ph"] == "X"} == {"step 0", "compute", "wait"}
