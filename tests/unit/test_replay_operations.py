"""Operations of several ranks, as NCCL has them: both sides come to a message, and both leave when it has passed."""

from __future__ import annotations

import pytest

from patchpar.plan.replay.fold import replay_groups
from patchpar.plan.replay.replay import Deadlock, Replayed, replay
from patchpar.plan.replay.tape import Kernel, Leave, Receive, Send, Tape, TapeEntry, Wait
from patchpar.plan.replay.topology import Resource, Route, Topology, equal_ports

RATE = 100.0


def exchanged(rank: int, before: float, num_bytes: int, *, joined: bool, operation: int = 1) -> Tape:
    """One of two ranks computes, exchanges, and computes for a second. `joined`: in an operation of both."""
    peer, number = 1 - rank, operation - 1
    begun = Send(number, (peer,), "kv", num_bytes, operation=operation * joined), Receive(number, peer)
    return Kernel("block", before), *begun, Wait(number, peer, num_bytes), Leave(operation), Kernel("block", 1.0)


@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_a_message_of_an_operation_leaves_when_both_ranks_have_come(latency: float) -> None:
    """Rank 0 comes after 1 s, rank 1 after 4 s; a message takes 2 s. Sent at once, it would be there after 3 s."""
    tapes = [exchanged(rank, (1.0, 4.0)[rank], 200, joined=True) for rank in range(2)]
    found = replay(tapes, equal_ports(RATE, latency))
    assert found.ends == (4 + 2 + latency + 1, 4 + 2 + latency + 1)
    assert found.waited == (5 + latency, 2 + latency)
    at_once = replay([exchanged(rank, (1.0, 4.0)[rank], 200, joined=False) for rank in range(2)], equal_ports(RATE))
    assert at_once.ends == (4 + 2 + 1, 4 + 1)


def test_a_rank_leaves_an_operation_when_what_it_sent_has_arrived() -> None:
    """Rank 0 sends 300 bytes and gets 100: it leaves after 3 s, not after 1 s."""
    tapes: list[Tape] = [
        (Send(0, (1 - rank,), "kv", size, operation=1), Receive(0, 1 - rank), Wait(0, 1 - rank, 400 - size), Leave(1))
        for rank, size in enumerate((300, 100))
    ]
    assert replay(tapes, equal_ports(RATE)).ends == (3.0, 3.0)
    assert replay([tape[:-1] for tape in tapes], equal_ports(RATE)).ends == (1.0, 3.0)


def test_a_late_rank_of_three_holds_up_those_that_wait_for_it() -> None:
    """Rank 2 comes after 5 s, and exchanges 1 s of bytes each way with rank 0, then with rank 1: its ports are busy."""
    tapes: list[Tape] = []
    for rank in range(3):
        peers = [peer for peer in range(3) if peer != rank]
        tapes.append(
            (
                Kernel("block", 5.0 * (rank == 2)),
                *(Send(0, (peer,), "kv", 100, operation=7) for peer in peers),
                *(Receive(0, peer) for peer in peers),
                *(Wait(0, peer, 100) for peer in peers),
                Leave(7),
            )
        )
    assert replay(tapes, equal_ports(RATE)).ends == (6.0, 7.0, 7.0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_an_operation_of_all_ranks_takes_what_the_busiest_port_does(ranks: int) -> None:
    """NCCL sends to the next rank first, then to the one after it: no port waits. Apart, messages wait for others."""

    def tapes(operation: int) -> list[Tape]:
        others = [[peer for peer in range(ranks) if peer != rank] for rank in range(ranks)]
        return [
            (
                *(Send(0, (peer,), "kv", 100, operation=operation) for peer in peers),
                *(Receive(0, peer) for peer in peers),
                *(Wait(0, peer, 100) for peer in peers),
                Leave(operation),
            )
            for peers in others
        ]

    assert replay(tapes(1), equal_ports(RATE)).ends == (ranks - 1.0,) * ranks
    apart = replay([tape[:-1] for tape in tapes(0)], equal_ports(RATE)).seconds
    assert apart > ranks - 1 or ranks == 2


@pytest.mark.parametrize("absent", ["receiver", "sender"])
def test_an_operation_that_one_side_never_comes_to_is_a_deadlock(absent: str) -> None:
    send, receive = Send(3, (1,), "kv", 8, "up.0", operation=1), Receive(3, 0, "up.0")
    tapes: list[Tape] = [(send, Leave(1, "up.0")), (receive, Wait(3, 0, 8, "up.0"))]
    replay(tapes, equal_ports(RATE))
    if absent == "receiver":
        with pytest.raises(Deadlock, match=r"rank 0 waits at up\.0 until rank 1 comes to exchange 3"):
            replay([tapes[0], ()], equal_ports(RATE))
    else:
        with pytest.raises(Deadlock, match=r"rank 1 waits at up\.0 for exchange 3 of rank 0"):
            replay([(), tapes[1]], equal_ports(RATE))


def test_each_of_two_ranks_that_leaves_its_own_operation_first_is_a_deadlock() -> None:
    """Without operations the same order is one that ends: what is sent waits at the other rank."""

    def tapes(operation: int) -> list[Tape]:
        sends = [Send(0, (1 - rank,), "kv", 8, operation=operation) for rank in range(2)]
        return [(sends[rank], Leave(1, "up.0"), Receive(0, 1 - rank), Wait(0, 1 - rank, 8)) for rank in range(2)]

    with pytest.raises(Deadlock, match=r"rank 0 waits at up\.0 until rank 1 .*; rank 1 waits at up\.0 until rank 0"):
        replay(tapes(1), equal_ports(RATE))
    assert replay(tapes(0), equal_ports(RATE)).ends == (0.08, 0.08)


def test_folded_operations_take_as_long_as_all_ranks() -> None:
    """Three groups of two; one card for both ways takes messages of a group one after the other."""

    def path(a: int, b: int) -> Route:
        return Route((Resource(f"card {a // 2}", RATE),), 0.25)

    tapes = [exchanged(rank, (1.0, 4.0)[rank], 200, joined=True) for rank in range(2)]
    found = replay_groups(tapes, 3, Topology(path))
    assert [(count, each.ends) for count, each in found.found] == [(3, (9.25, 9.25))]


def overtaken(*between: TapeEntry, bulk_bytes: int, fresh_bytes: int) -> Replayed:
    """Rank 0 sends bulk to rank 1, then does what is `between`, and sends what rank 2 waits for."""
    bus = Route((Resource("bus", RATE),))
    bulk, fresh = Send(0, (1,), "kv", bulk_bytes, bulk=True), Send(0, (2,), "halo", fresh_bytes)
    tapes: list[Tape] = [(bulk, *between, fresh), (Wait(0, 0, bulk_bytes),), (Wait(0, 0, fresh_bytes),)]
    return replay(tapes, Topology(lambda a, b: bus))


def test_a_message_that_overtakes_bulk_shares_the_rate_with_it() -> None:
    """10 s of bulk; 1 s of fresh values takes 2 s from when it is sent, and bulk is over after all of them."""
    assert overtaken(bulk_bytes=1000, fresh_bytes=100).ends == (0.0, 11.0, 2.0)
    assert overtaken(Kernel("block", 4.0), bulk_bytes=1000, fresh_bytes=100).ends == (4.0, 11.0, 6.0)


def test_rates_are_shared_no_longer_than_both_are_there() -> None:
    """Fresh values of 4 s meet 1 s of bulk: both have half of the rate for 2 s. Without bulk nothing changes."""
    assert overtaken(Kernel("block", 9.0), bulk_bytes=1000, fresh_bytes=400).ends == (9.0, 11.0, 14.0)
    assert overtaken(Kernel("block", 12.0), bulk_bytes=1000, fresh_bytes=400).ends == (12.0, 10.0, 16.0)


def test_fresh_messages_share_the_rate_one_after_the_other() -> None:
    """Two of 1 s each, of which the second begins when the first is over, after 2 s."""
    between = Send(1, (2,), "halo", 100)
    assert overtaken(between, bulk_bytes=1000, fresh_bytes=100).ends == (0.0, 12.0, 4.0)


def test_a_message_behind_no_bulk_of_its_own_ports_is_not_held_up() -> None:
    """Bulk from 0 to 1 takes other ports than fresh values from 2 to 3 do."""
    tapes: list[Tape] = [
        (Send(0, (1,), "kv", 1000, bulk=True),),
        (Wait(0, 0, 1000),),
        (Send(0, (3,), "halo", 100),),
        (Wait(0, 2, 100),),
    ]
    assert replay(tapes, equal_ports(RATE)).ends == (0.0, 10.0, 0.0, 1.0)
