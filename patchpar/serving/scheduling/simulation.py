"""Policies in virtual time: what they do with a trace of requests whose costs are known. Nothing sleeps."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from patchpar.serving.scheduling.policies import Policy
from patchpar.serving.scheduling.state import (
    RunningRequest,
    ScheduleState,
    StartRequest,
    SuspendRequest,
    WaitForBatch,
    WaitingRequest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """A request that has ended. `starts`: how often it was started, more than once if it was suspended."""

    request: WaitingRequest
    end: float
    starts: int

    @property
    def is_met(self) -> bool:
        """Whether it has met its deadline."""
        return self.end <= self.request.deadline

    @property
    def seconds(self) -> float:
        """From arrival to end."""
        return self.end - self.request.arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    """`devices`, and whether and at which cost in seconds running requests can be suspended there.

    `batch`, `batch_wait`: see ScheduleState. A batch takes as long as its requests one after the other, which is the
    most that it takes.
    """

    devices: int
    can_suspend: bool = False
    resume_seconds: float = 0.0
    batch: int = 1
    batch_wait: float = 0.0


class Simulation:
    """One run of a policy."""

    def __init__(self, policy: Policy, cluster: SimulatedCluster) -> None:
        self._policy, self._cluster = policy, cluster
        self._now = 0.0
        self._waiting: list[WaitingRequest] = []
        self._running: dict[object, RunningRequest] = {}
        self._first: dict[object, WaitingRequest] = {}
        self._starts: dict[object, int] = {}

    def run(self, trace: Sequence[WaitingRequest]) -> tuple[SimulatedRequest, ...]:
        """Return the requests of a trace in the order in which they end. Raises AssertionError for a wrong policy."""
        numbers = count()
        arrivals = [(each.arrival, next(numbers), each) for each in trace]
        heapq.heapify(arrivals)
        ended: list[SimulatedRequest] = []
        while arrivals or self._waiting or self._running:
            begins = self._act()
            ends = min((each.end for each in self._running.values()), default=float("inf"))
            arrives = arrivals[0][0] if arrivals else float("inf")
            assert min(ends, arrives, begins) < float("inf"), "the policy starts nothing, and nothing runs"
            self._now = max(self._now, min(ends, arrives, begins))
            while arrivals and arrivals[0][0] <= self._now:
                _, _, request = heapq.heappop(arrivals)
                self._first[request.name] = request
                self._waiting.append(request)
            ended += [self._ended(each) for each in list(self._running.values()) if each.end <= self._now]
        return tuple(ended)

    def _ended(self, running: RunningRequest) -> SimulatedRequest:
        name = running.request.name
        del self._running[name]
        return SimulatedRequest(request=self._first[name], end=running.end, starts=self._starts[name])

    def _act(self) -> float:
        """Do what the policy orders, until it orders nothing, or to wait until the time that is returned."""
        while actions := self._policy(self._state()):
            for action in actions:
                if isinstance(action, WaitForBatch):
                    assert action.until > self._now, "a policy waits for a later time"
                    return action.until
                if isinstance(action, StartRequest):
                    self._start(action)
                else:
                    self._suspend(action)
        return float("inf")

    def _state(self) -> ScheduleState:
        cluster = self._cluster
        return ScheduleState(
            now=self._now,
            devices=cluster.devices,
            waiting=tuple(self._waiting),
            running=tuple(self._running.values()),
            can_suspend=cluster.can_suspend,
            resume_seconds=cluster.resume_seconds,
            batch=cluster.batch,
            batch_wait=cluster.batch_wait,
        )

    def _start(self, start: StartRequest) -> None:
        request = start.request
        if request.batch_key is not None and request not in self._waiting:
            return  # it has been joined with one that has started
        assert start.degree in request.degrees, "a request has degrees that it can run on"
        assert start.degree <= self._state().free, "a policy starts on free devices"
        self._waiting.remove(request)
        again = self._cluster.resume_seconds if request.suspensions else 0.0
        key, most = request.batch_key, self._cluster.batch - 1
        peers = [each for each in self._waiting if key is not None and each.batch_key == key][:most]
        end = self._now + again + sum(each.seconds(start.degree) for each in (request, *peers))
        for each in (request, *peers):
            degree = 0 if each in peers else start.degree
            self._running[each.name] = RunningRequest(request=each, degree=degree, end=end)
            self._starts[each.name] = self._starts.get(each.name, 0) + 1
        self._waiting = [each for each in self._waiting if each not in peers]

    def _suspend(self, suspend: SuspendRequest) -> None:
        """Let a request wait again, with the steps that it has not ended."""
        assert self._cluster.can_suspend, "a policy suspends where that is possible"
        running = self._running.pop(suspend.request.request.name)
        request = running.request
        step = request.costs.steps[running.degree]
        left = max(1, min(request.steps, -int(-(running.end - self._now) // step)))
        self._waiting.append(replace(request, steps=left, suspensions=request.suspensions + 1))


def simulate(
    policy: Policy, cluster: SimulatedCluster, trace: Sequence[WaitingRequest]
) -> tuple[SimulatedRequest, ...]:
    """Return the requests of a trace, as they end under a policy."""
    return Simulation(policy, cluster).run(trace)
