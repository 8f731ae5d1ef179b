"""The replay of one tape per rank: a clock for each, and messages that queue for the resources of their routes.

The rank whose clock is least runs its next entry. A kernel takes its seconds, and begins no earlier than the process
has launched it. A message takes every resource of its route from when it is free, for bytes / rate, and arrives a
latency after the last has passed it; where some messages are bulk, all others queue behind each other only. A wait sets
the clock to the arrival; without one the rank sleeps until the message is sent.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from patchpar.errors import PlanError
from patchpar.plan.replay.tape import Boundary, Kernel, Operator, Send, Tape, Wait
from patchpar.plan.replay.topology import Topology

COMPUTE, LAUNCH, WAIT, STEP = "compute", "launch", "wait", "step"


class Deadlock(PlanError):
    """Every rank that has not ended waits for a message that nobody sends; names ranks and exchange points."""


class Interval(NamedTuple):
    """What a rank did from `start`, for `seconds`: `what` is compute, launch, wait or step.

    launch: the device had nothing to do until the process had launched a kernel. step: a phase of the call.
    """

    rank: int
    what: str
    name: str
    start: float
    seconds: float
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Seconds at which each rank ended and that it waited, and all intervals."""

    ends: tuple[float, ...]
    waited: tuple[float, ...]
    intervals: tuple[Interval, ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last rank has ended."""
        return max(self.ends, default=0.0)


def replay(tapes: Sequence[Tape], topology: Topology) -> Replayed:
    """Replay `tapes`, one per rank.

    Raises Deadlock, and PlanError where a rank sends to one that is not there, or an operator has no price.
    """
    return _Replay(tapes, topology).run()


class _Key(NamedTuple):
    number: int
    sender: int
    receiver: int


class _Step(NamedTuple):
    name: str
    start: float


class _Replay:
    def __init__(self, tapes: Sequence[Tape], topology: Topology) -> None:
        self._tapes, self._topology = tapes, topology
        self._next = [0] * len(tapes)
        self._clock, self._host = [0.0] * len(tapes), [0.0] * len(tapes)
        self._waited = [0.0] * len(tapes)
        self._steps: list[_Step | None] = [None] * len(tapes)
        self._free: dict[str, float] = {}
        self._free_of_bulk: dict[str, float] = {}  # of messages that are not bulk
        self._arrivals: dict[_Key, float] = {}
        self._asleep: dict[int, _Key] = {}
        self._intervals: list[Interval] = []
        self._heap = [(0.0, rank) for rank in range(len(tapes))]

    def run(self) -> Replayed:
        while self._heap:
            _, rank = heapq.heappop(self._heap)
            if self._next[rank] == len(self._tapes[rank]):
                self._step(rank, "")
            elif self._runs(rank):
                self._next[rank] += 1
                heapq.heappush(self._heap, (self._clock[rank], rank))
        if self._asleep:
            raise Deadlock("; ".join(map(self._stuck, sorted(self._asleep))) + ": send each message before its wait")
        return Replayed(tuple(self._clock), tuple(self._waited), tuple(self._intervals))

    def _runs(self, rank: int) -> bool:
        """Run the next entry of a rank; return False if it sleeps instead."""
        entry = self._tapes[rank][self._next[rank]]
        if isinstance(entry, Kernel):
            self._compute(rank, entry)
        elif isinstance(entry, Send):
            for peer in entry.peers:
                self._send(rank, peer, entry)
        elif isinstance(entry, Wait):
            return self._wait(rank, entry)
        elif isinstance(entry, Operator):
            raise PlanError(f"{entry.name} of rank {rank} has no price: replay what `Prices.of` returns")
        elif isinstance(entry, Boundary) and entry.is_step:
            self._step(rank, entry.name)
        return True

    def _compute(self, rank: int, entry: Kernel) -> None:
        late = self._host[rank] + entry.after_launch - (self._clock[rank] + entry.seconds)
        if late > 0:
            self._advance(rank, LAUNCH, entry.name, late)
        if entry.seconds:
            self._advance(rank, COMPUTE, entry.name, entry.seconds)
        self._host[rank] += entry.host

    def _step(self, rank: int, name: str) -> None:
        """Begin a step, and end the one before."""
        before, now = self._steps[rank], self._clock[rank]
        if before is not None:
            self._intervals.append(Interval(rank, STEP, before.name, before.start, now - before.start))
        self._steps[rank] = _Step(name, now) if name else None

    def _advance(self, rank: int, what: str, name: str, seconds: float, kind: str = "") -> None:
        self._intervals.append(Interval(rank, what, name, self._clock[rank], seconds, kind))
        self._clock[rank] += seconds

    def _send(self, rank: int, peer: int, entry: Send) -> None:
        if not 0 <= peer < len(self._tapes):
            raise PlanError(f"rank {rank} sends to rank {peer} of {len(self._tapes)}: use 0 to {len(self._tapes) - 1}")
        key = _Key(entry.number, rank, peer)
        self._arrivals[key] = self._arrival(rank, peer, entry)
        if self._asleep.get(peer) == key:
            del self._asleep[peer]
            heapq.heappush(self._heap, (self._clock[peer], peer))

    def _arrival(self, rank: int, peer: int, entry: Send) -> float:
        route = self._topology.path(rank, peer)
        start = end = self._clock[rank]
        for resource in route.resources:
            name, seconds = resource.name, entry.num_bytes / resource.rate
            behind_all = max(start, self._free.get(name, 0.0))
            self._free[name] = behind_all + seconds
            if entry.bulk:
                start = behind_all
            else:
                start = max(start, self._free_of_bulk.get(name, 0.0))
                self._free_of_bulk[name] = start + seconds
            end = max(end, start + seconds)
        return end + route.latency

    def _wait(self, rank: int, entry: Wait) -> bool:
        key = _Key(entry.number, entry.sender, rank)
        if key not in self._arrivals:
            self._asleep[rank] = key
            return False
        late = self._arrivals[key] - self._clock[rank]
        if late > 0:
            self._waited[rank] += late
            self._advance(rank, WAIT, entry.where, late, entry.kind)
        return True

    def _stuck(self, rank: int) -> str:
        entry = self._tapes[rank][self._next[rank]]
        assert isinstance(entry, Wait)
        return f"rank {rank} waits at {entry.where or 'a wait'} for exchange {entry.number} of rank {entry.sender}"
