"""Steps of two ranks as programs: recorded on the bare link, and replayed behind a transport that delays messages.

What is recorded is a turn: as many steps in a row as a strategy takes until it does the same again, in most cases one.

A rank waits until the bare link has brought a message, receives it, and then until the delayed link would have. So the
bare link is below the other: its time is hidden in that of a slower one. In the replay each rank's messages take both
ways, through a resource with the latency and the rate of the delayed link, and by a rank that stands for the bare one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from patchpar.plan.link_model import LinkModel, TimedMessage
from patchpar.plan.replay.replay import replay
from patchpar.plan.replay.tape import Boundary, Kernel, Send, Tape, TapeEntry, Wait
from patchpar.plan.replay.topology import Resource, Route, Topology

LONGEST_BARE, HALVINGS = 0.01, 16
"""Seconds; and the halvings by which the latency of the bare link is found."""
STEPS, SETTLED = 12, 4
"""Steps that are replayed, and those at the beginning that are left out: old values are known, and queues as long."""
RANKS, TURN = 2, "turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A turn of one rank on the bare link: its seconds without waits, and its exchanges in order.

    The age of a message counts turns. `waits`: seconds that the rank waited for the message of each exchange, which may
    have been here before.
    """

    seconds: float
    messages: tuple[TimedMessage, ...]
    waits: tuple[float, ...]

    @classmethod
    def median_of(cls, turns: Sequence[RecordedTurn]) -> RecordedTurn:
        """Return one for an odd number of turns of a rank: the median of each time."""
        messages = tuple(
            replace(alike[0], sent=median(each.sent for each in alike), needed=median(each.needed for each in alike))
            for alike in zip(*(turn.messages for turn in turns), strict=True)
        )
        waits = tuple(map(median, zip(*(turn.waits for turn in turns), strict=True)))
        return cls(seconds=median(turn.seconds for turn in turns), messages=messages, waits=waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRanks:
    """A turn of each of two ranks, of so many steps. `receiving`: seconds of receiving each message once it is here."""

    steps: int
    ranks: tuple[RecordedTurn, ...]
    receiving: tuple[float, ...]

    @classmethod
    def of(cls, steps: int, turns: Sequence[Sequence[RecordedTurn]]) -> RecordedRanks:
        """Return one for an odd number of turns of both ranks: in each, the later rank only receives."""
        least = [map(min, zip(*(rank.waits for rank in ranks), strict=True)) for ranks in turns]
        return cls(
            steps=steps,
            ranks=tuple(map(RecordedTurn.median_of, zip(*turns, strict=True))),
            receiving=tuple(map(median, zip(*least, strict=True))),
        )


class Event(NamedTuple):
    """A wait or a send of exchange `number` of all turns, in seconds of computing since the beginning."""

    at: float
    is_wait: bool
    number: int
    exchange: int


def tape_of(recorded: RecordedRanks, rank: int, computing: float) -> Tape:
    """Return the program of one of two ranks, which computes for so many seconds in a turn."""
    own, found, now, turn = recorded.ranks[rank], list[TapeEntry](), 0.0, 0
    turns = STEPS // recorded.steps
    for event in _events(recorded, rank, computing):
        while turn < turns and event.at >= turn * computing:
            found += [Kernel("compute", max(0.0, turn * computing - now)), Boundary(TURN, is_step=True)]
            now, turn = max(now, turn * computing), turn + 1
        found.append(Kernel("compute", max(0.0, event.at - now)))
        now = max(now, event.at)
        if event.is_wait:
            found.append(Wait(event.number, _bare(1 - rank), 0))
            found.append(Kernel("receive", recorded.receiving[event.exchange]))
            found.append(Wait(event.number, 1 - rank, 0))
        elif num_bytes := int(own.messages[event.exchange].num_bytes):
            found.append(Send(event.number, (_bare(rank),), "", 0))
            found.append(Send(event.number, (1 - rank,), "", num_bytes))
    return (*found, Kernel("compute", max(0.0, turns * computing - now)))


def _events(recorded: RecordedRanks, rank: int, computing: float) -> list[Event]:
    own, other, events = recorded.ranks[rank], recorded.ranks[1 - rank], list[Event]()
    scale, count = computing / own.seconds, len(own.messages)
    for turn in range(STEPS // recorded.steps):
        for exchange, message in enumerate(own.messages):
            events.append(Event(turn * computing + scale * message.sent, False, turn * count + exchange, exchange))
            if turn >= message.age and other.messages[exchange].num_bytes:
                needed, sent_in = turn * computing + scale * message.needed, turn - message.age
                events.append(Event(needed, True, sent_in * count + exchange, exchange))
    return sorted(events)


def _bare(rank: int) -> int:
    """Return the rank that stands for the bare link of this one's messages."""
    return RANKS + rank


def _passed_on(tape: Tape, rank: int) -> Tape:
    """Return the program of the bare link: what a rank sends to it, it sends to the other."""
    sent = [entry.number for entry in tape if isinstance(entry, Send) and entry.peers == (_bare(rank),)]
    passed: list[TapeEntry] = []
    for number in sent:
        passed += [Wait(number, rank, 0), Send(number, (1 - rank,), "", 0)]
    return tuple(passed)


def replayed_step(recorded: RecordedRanks, link: LinkModel, computing: Sequence[float], bare: float) -> float:
    """Return the seconds of a later step of two ranks, each with one way out, that compute for so many seconds in it.

    `bare`: seconds of a message on the bare link.
    """
    tapes = [tape_of(recorded, rank, recorded.steps * computing[rank]) for rank in range(RANKS)]

    def path(a: int, b: int) -> Route:
        if max(a, b) >= RANKS:
            return Route((), bare if b >= RANKS else 0.0)
        return Route((Resource(f"out {a}", link.rate),), link.latency)

    found = replay([*tapes, *map(_passed_on, tapes, range(RANKS))], Topology(path))
    starts = [each.start for each in found.intervals if each.rank == 0 and each.name == TURN]
    later = starts[SETTLED // recorded.steps :]
    return (found.ends[0] - later[0]) / (len(later) * recorded.steps)


def bare_latency(recorded: RecordedRanks, computing: Sequence[float], step: float) -> float:
    """Return the latency with which a step on the bare link takes `step` seconds, at most LONGEST_BARE."""
    low, high = 0.0, LONGEST_BARE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_less = replayed_step(recorded, LinkModel(), computing, middle) < step
        low, high = (middle, high) if is_less else (low, middle)
    return low
