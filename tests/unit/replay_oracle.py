"""A replay by brute force: guesses when messages arrive, runs each rank alone, and repeats until nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from patchpar.plan.replay.tape import Kernel, Leave, Receive, Send, Tape, Wait
from patchpar.plan.replay.topology import Topology


class Sent(NamedTuple):
    """A message, sorted as links take them: by the rank that comes to it last, and where in its program."""

    at: float
    last: int
    entry: int
    index: int
    sender: int
    receiver: int
    number: int
    num_bytes: int
    bulk: bool
    operation: int


Key = tuple[int, int, int]
Come = dict[Key, tuple[float, int, int]]
"""When a rank has come to a message, as its receiver, and where in its program: with the rank before it."""


def ends_by_brute_force(tapes: Sequence[Tape], topology: Topology) -> list[float]:
    """When each rank ends."""
    arrivals: dict[Key, float] = {}
    for _ in range(10_000):
        come: Come = {}
        ran = [_run(rank, tape, arrivals, come) for rank, tape in enumerate(tapes)]
        messages = [_left(each, come) if joined else each for _, sent in ran for each, joined in sent]
        found = _delivered(sorted(messages), topology)
        if found == arrivals:
            return [end for end, _ in ran]
        arrivals = found
    raise AssertionError("no end")


def _run(rank: int, tape: Tape, arrivals: dict[Key, float], come: Come) -> tuple[float, list[tuple[Sent, bool]]]:
    clock = host = 0.0
    sent: list[tuple[Sent, bool]] = []
    operations: dict[int, list[Key]] = {}
    for number, entry in enumerate(tape):
        if isinstance(entry, Kernel):
            clock = max(clock + entry.seconds, host + entry.after_launch)
            host = max(host + entry.host, clock * entry.waits)
        elif isinstance(entry, Send):
            for index, peer in enumerate(entry.peers):
                message = Sent(
                    clock, rank, number, index, rank, peer, entry.number, entry.num_bytes, entry.bulk, entry.operation
                )
                sent.append((message, bool(entry.operation)))
                operations.setdefault(entry.operation, []).append((entry.number, rank, peer))
        elif isinstance(entry, Receive):
            come[entry.number, entry.sender, rank] = clock, rank, number
        elif isinstance(entry, Wait):
            clock = max(clock, arrivals.get((entry.number, entry.sender, rank), 0.0))
        elif isinstance(entry, Leave):
            clock = max(clock, *(arrivals.get(key, 0.0) for key in operations.get(entry.operation, ())), 0.0)
    return clock, sent


def _left(message: Sent, come: Come) -> Sent:
    """Return a message of an operation as it leaves: when both have come."""
    at, last, entry = come[message.number, message.sender, message.receiver]
    return max(message, message._replace(at=at, last=last, entry=entry, index=0))


def _delivered(messages: Sequence[Sent], topology: Topology) -> dict[Key, float]:
    found: dict[Key, float] = {}
    free: dict[tuple[str, bool], float] = {}
    on_its_way: dict[str, dict[Key, float]] = {}  # bulk, by resource, until when
    latency: dict[Key, float] = {}
    for each in messages:
        key, route = (each.number, each.sender, each.receiver), topology.path(each.sender, each.receiver)
        start = end = each.at
        latency[key] = route.latency
        longest = max((each.num_bytes / resource.rate for resource in route.resources), default=0.0)
        for name, seconds in ((resource.name, each.num_bytes / resource.rate) for resource in route.resources):
            bulk = on_its_way.setdefault(name, {})
            begins = max(start, free.get((name, each.bulk), 0.0))
            free[name, True] = max(start, free.get((name, True), 0.0)) + seconds  # bulk waits for all
            if each.bulk:
                ends = bulk[key] = begins + seconds
            else:
                both = [min(seconds, max(0.0, until - begins)) for until in bulk.values()]
                ends = free[name, False] = begins + seconds + max(both, default=0.0)
                for held_up, more in zip(list(bulk), both, strict=True):
                    bulk[held_up] += more
                    found[held_up] = max(found[held_up], bulk[held_up] + latency[held_up])
            start, end = start if each.operation else max(start, begins + seconds - longest), max(end, ends)
        found[key] = end + route.latency
    return found
