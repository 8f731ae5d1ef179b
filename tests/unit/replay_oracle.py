"""A replay by brute force: guesses when messages arrive, runs each rank alone, and repeats until nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from patchpar.plan.replay.tape import Kernel, Send, Tape, Wait
from patchpar.plan.replay.topology import Topology


class Sent(NamedTuple):
    """A message, sorted as links take them."""

    at: float
    sender: int
    entry: int
    index: int
    receiver: int
    number: int
    num_bytes: int
    bulk: bool


Key = tuple[int, int, int]


def ends_by_brute_force(tapes: Sequence[Tape], topology: Topology) -> list[float]:
    """When each rank ends."""
    arrivals: dict[Key, float] = {}
    for _ in range(10_000):
        ran = [_run(rank, tape, arrivals) for rank, tape in enumerate(tapes)]
        found = _delivered(sorted(each for _, sent in ran for each in sent), topology)
        if found == arrivals:
            return [end for end, _ in ran]
        arrivals = found
    raise AssertionError("no end")


def _run(rank: int, tape: Tape, arrivals: dict[Key, float]) -> tuple[float, list[Sent]]:
    clock = host = 0.0
    sent = []
    for number, entry in enumerate(tape):
        if isinstance(entry, Kernel):
            clock = max(clock + entry.seconds, host + entry.after_launch)
            host += entry.host
        elif isinstance(entry, Send):
            sent += [
                Sent(clock, rank, number, index, peer, entry.number, entry.num_bytes, entry.bulk)
                for index, peer in enumerate(entry.peers)
            ]
        elif isinstance(entry, Wait):
            clock = max(clock, arrivals.get((entry.number, entry.sender, rank), 0.0))
    return clock, sent


def _delivered(messages: Sequence[Sent], topology: Topology) -> dict[Key, float]:
    found: dict[Key, float] = {}
    free: dict[tuple[str, bool], float] = {}
    for each in messages:
        route = topology.path(each.sender, each.receiver)
        start = end = each.at
        for resource in route.resources:
            seconds = each.num_bytes / resource.rate
            begins = {bulk: max(start, free.get((resource.name, bulk), 0.0)) for bulk in (False, True)}
            if not each.bulk:
                free[resource.name, False] = begins[False] + seconds
            free[resource.name, True] = begins[True] + seconds  # bulk waits for all
            start = begins[each.bulk]
            end = max(end, start + seconds)
        found[each.number, each.sender, each.receiver] = end + route.latency
    return found
