"""The replay of one tape per rank: a clock for each, and messages that queue for the resources of their routes.

The rank whose clock is least runs its next entry. A kernel takes its seconds, and begins no earlier than the process
has launched it; the process launches nothing before a value that it asks for is there. A message leaves when it is
sent, or, in an operation of several ranks, when its receiver has come too. It takes every resource of its route from
when it is free, for bytes / rate, and arrives a latency after the last has passed it. Messages that a rank sends itself
take them one after the other. Those of an operation take all at once: NCCL sends to no rank that another one sends to,
so that all ranks take what the busiest port does. Through resources that are faster than the slowest of the route,
other messages pass at the same time. A wait sets the clock to the arrival; without one the rank sleeps until the
message leaves.

Messages that are not bulk queue behind each other only. While bulk is there too, each of both has half of the rate.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from patchpar.errors import PlanError
from patchpar.plan.replay.tape import Boundary, Kernel, Leave, Operator, Receive, Send, Tape, Wait
from patchpar.plan.replay.topology import Topology

COMPUTE, LAUNCH, WAIT, STEP = "compute", "launch", "wait", "step"


class Deadlock(PlanError):
    """Every rank that has not ended waits for a message that nobody sends or takes; names ranks, exchange points."""


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


_Key = tuple[int, int, int]
"""Number, sender and receiver of a message: a named tuple takes several times as long to make."""


class _Step(NamedTuple):
    name: str
    start: float


class _PairRoute(NamedTuple):
    """A route: the queue and the rate of each resource, the least of these rates, and the latency; no rate: 0."""

    resources: tuple[tuple["_Queue", float], ...]
    least_rate: float
    latency: float


@dataclass(slots=True)
class _Bulk:
    """A message that passes a resource until `end`, and arrives `latency` later."""

    end: float
    latency: float


class _Queue:
    """The messages that pass a resource, in the order in which they leave. Times are in seconds."""

    def __init__(self) -> None:
        self._free = self._free_of_others = 0.0
        self.bulk: dict[_Key, _Bulk] = {}  # that may be on its way

    def behind_all(self, key: _Key, at: float, seconds: float, latency: float) -> tuple[float, float]:
        """Let bulk pass that comes at this time; return when it begins and ends."""
        start = max(at, self._free)
        self._free = start + seconds
        self.bulk[key] = _Bulk(self._free, latency)
        return start, self._free

    def beside_bulk(self, at: float, seconds: float) -> tuple[float, float]:
        """Let another message pass; return when it begins and ends."""
        self._free = max(at, self._free) + seconds
        start = max(at, self._free_of_others)
        self._free_of_others = start + seconds + (self._held_up(start, seconds) if self.bulk else 0.0)
        return start, self._free_of_others

    def _held_up(self, start: float, seconds: float) -> float:
        """Hold bulk up; return for how long it is there too."""
        self.bulk = {key: each for key, each in self.bulk.items() if each.end > start}
        left = max((each.end - start for each in self.bulk.values()), default=0.0)
        for each in self.bulk.values():
            each.end += min(seconds, each.end - start)
        return min(seconds, left)


class _Replay:
    def __init__(self, tapes: Sequence[Tape], topology: Topology) -> None:
        self._tapes, self._topology = tapes, topology
        self._next = [0] * len(tapes)
        self._clock, self._host = [0.0] * len(tapes), [0.0] * len(tapes)
        self._waited = [0.0] * len(tapes)
        self._steps: list[_Step | None] = [None] * len(tapes)
        self._queues: defaultdict[str, _Queue] = defaultdict(_Queue)
        self._arrivals: dict[_Key, float] = {}
        self._operations: defaultdict[tuple[int, int], list[_Key]] = defaultdict(list)  # what a rank sends in each
        self._held: dict[_Key, Send] = {}  # until the receiver has come
        self._expected: set[_Key] = set()  # of which the receiver has come first
        self._asleep: dict[int, _Key] = {}
        self._intervals: list[Interval] = []
        self._heap = [(0.0, rank) for rank in range(len(tapes))]
        self._pair_routes: dict[tuple[int, int], _PairRoute] = {}
        self._actions: dict[type, Callable[[int, Any], bool]] = {
            Kernel: self._compute,
            Send: self._send_all,
            Receive: self._receive,
            Wait: self._is_over,
            Leave: self._is_over,
            Boundary: self._pass_boundary,
            Operator: self._refuse,
        }

    def run(self) -> Replayed:
        heap = self._heap
        first = heapq.heappop(heap) if heap else None
        while first is not None:
            _, rank = first
            tape, number = self._tapes[rank], self._next[rank]
            if number == len(tape):
                self._step(rank, "")
            else:
                entry = tape[number]
                self._next[rank] += self._actions[type(entry)](rank, entry)
                if rank not in self._asleep:
                    first = heapq.heappushpop(heap, (self._clock[rank], rank))
                    continue
            first = heapq.heappop(heap) if heap else None
        if self._asleep:
            raise Deadlock("; ".join(map(self._stuck, sorted(self._asleep))) + ": send each message before its wait")
        return Replayed(tuple(self._clock), tuple(self._waited), tuple(self._intervals))

    # Each action returns whether the entry is over: where it waits, the rank comes to it again.

    def _compute(self, rank: int, entry: Kernel) -> bool:
        late = self._host[rank] + entry.after_launch - (self._clock[rank] + entry.seconds)
        if late > 0:
            self._advance(rank, LAUNCH, entry.name, late)
        if entry.seconds:
            self._advance(rank, COMPUTE, entry.name, entry.seconds)
        self._host[rank] += entry.host
        if entry.waits:
            self._host[rank] = max(self._host[rank], self._clock[rank])
        return True

    def _pass_boundary(self, rank: int, entry: Boundary) -> bool:
        if entry.is_step:
            self._step(rank, entry.name)
        return True

    def _refuse(self, rank: int, entry: Operator) -> bool:
        raise PlanError(f"{entry.name} of rank {rank} has no price: replay what `Prices.of` returns")

    def _send_all(self, rank: int, entry: Send) -> bool:
        for peer in entry.peers:
            self._send(rank, peer, entry)
        return True

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
        key = entry.number, rank, peer
        if entry.operation:
            self._operations[rank, entry.operation].append(key)
            if key not in self._expected:
                self._held[key] = entry
                return
        self._pass(key, entry, self._clock[rank])

    def _receive(self, rank: int, entry: Receive) -> bool:
        key = entry.number, entry.sender, rank
        held = self._held.pop(key, None)
        if held is None:
            self._expected.add(key)
        else:
            self._pass(key, held, self._clock[rank])
        return True

    def _pass(self, key: _Key, entry: Send, at: float) -> None:
        """Let a message leave, and wake who waits for it."""
        self._arrivals[key] = self._arrival(key, entry, at)
        for rank in key[1:] if self._asleep else ():
            if self._asleep.get(rank) == key:
                del self._asleep[rank]
                heapq.heappush(self._heap, (self._clock[rank], rank))

    def _arrival(self, key: _Key, entry: Send, at: float) -> float:
        way, num_bytes = self._pair_route(key[1], key[2]), entry.num_bytes
        end, slowest = at, num_bytes / way.least_rate if way.least_rate else 0.0
        for queue, rate in way.resources:
            seconds = num_bytes / rate
            if entry.bulk:
                start, over = queue.behind_all(key, at, seconds, way.latency)
            else:
                start, over = queue.beside_bulk(at, seconds)
                for held_up, each in queue.bulk.items():
                    self._arrivals[held_up] = max(self._arrivals[held_up], each.end + each.latency)
            end = max(end, over)
            if not entry.operation:
                at = max(at, start + seconds - slowest)
        return end + way.latency

    def _pair_route(self, sender: int, receiver: int) -> _PairRoute:
        found = self._pair_routes.get((sender, receiver))
        if found is None:
            route = self._topology.path(sender, receiver)
            resources = tuple((self._queues[each.name], each.rate) for each in route.resources)
            least = min((rate for _, rate in resources), default=0.0)
            found = self._pair_routes[sender, receiver] = _PairRoute(resources, least, route.latency)
        return found

    def _is_over(self, rank: int, entry: Wait | Leave) -> bool:
        """Wait for messages; return whether all are here. Those that others hold up meanwhile are waited for again."""
        until = 0.0
        for key in self._awaited(rank, entry):
            if key not in self._arrivals:
                self._asleep[rank] = key
                return False
            until = max(until, self._arrivals[key])
        late = until - self._clock[rank]
        if late <= 0:
            return True
        self._waited[rank] += late
        self._advance(rank, WAIT, entry.where, late, entry.kind)
        self._clock[rank] = until
        return False

    def _awaited(self, rank: int, entry: Wait | Leave) -> Sequence[_Key]:
        if isinstance(entry, Wait):
            return ((entry.number, entry.sender, rank),)
        return self._operations[rank, entry.operation]

    def _stuck(self, rank: int) -> str:
        entry, (number, sender, receiver) = self._tapes[rank][self._next[rank]], self._asleep[rank]
        assert isinstance(entry, (Wait, Leave))
        at = f"rank {rank} waits at {entry.where or 'a wait'}"
        if isinstance(entry, Wait):
            return f"{at} for exchange {number} of rank {sender}"
        return f"{at} until rank {receiver} comes to exchange {number}"
