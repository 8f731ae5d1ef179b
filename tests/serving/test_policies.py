"""Policies in virtual time: which order of requests they keep, and how much each is worth on a mix."""

from __future__ import annotations

from random import Random

import pytest

from patchpar.serving.scheduling.batch_wait import batch_begin, with_batch_wait
from patchpar.serving.scheduling.policies import MAX_SUSPENSIONS, POLICIES, deadline, latency, throughput
from patchpar.serving.scheduling.simulation import SimulatedCluster, SimulatedRequest, simulate
from patchpar.serving.scheduling.state import (
    NEVER,
    RunningRequest,
    ScheduleState,
    StartRequest,
    StepCosts,
    SuspendRequest,
    WaitingRequest,
)

SMALL = StepCosts(steps={1: 0.10, 2: 0.07, 4: 0.05, 8: 0.05})
LARGE = StepCosts(steps={1: 1.0, 2: 0.55, 4: 0.32, 8: 0.2})
STEPS = 10
EIGHT = SimulatedCluster(devices=8)


def request(name: object, costs: StepCosts = SMALL, **facts: float) -> WaitingRequest:
    return WaitingRequest(
        name=name,
        arrival=facts.get("arrival", 0.0),
        steps=STEPS,
        costs=costs,
        deadline=facts.get("deadline", NEVER),
        priority=int(facts.get("priority", 0)),
        batch_key="small" if facts.get("batch") else None,
    )


def started(state: ScheduleState, policy: str) -> list[tuple[object, int]]:
    return [(each.request.name, each.degree) for each in POLICIES[policy](state) if isinstance(each, StartRequest)]


def mix(count: int, load: float, seed: int = 0) -> list[WaitingRequest]:
    """70% small and 30% large, at `load` of what eight single devices can do; deadlines of 1 to 2 such calls."""
    random, now, found = Random(seed), 0.0, []
    mean = 0.7 * SMALL.seconds(1, STEPS) + 0.3 * LARGE.seconds(1, STEPS)
    for name in range(count):
        now += random.expovariate(8 * load / mean)
        costs = SMALL if random.random() < 0.7 else LARGE
        slack = random.uniform(1, 2) * costs.seconds(1, STEPS)
        found.append(request(name, costs, arrival=now, deadline=now + slack))
    return found


def test_a_degree_that_is_not_faster_is_not_used() -> None:
    assert SMALL.degrees == (1, 2, 4)
    assert StepCosts(steps={1: 1.0, 2: 1.2, 4: 0.9}).degrees == (1, 4)


def test_latency_gives_the_first_what_it_can_use_and_nobody_overtakes() -> None:
    waiting = (
        request("large", LARGE, arrival=0),
        request("small", arrival=1),
        request("urgent", arrival=2, priority=1),
    )
    state = ScheduleState(now=3.0, devices=8, waiting=waiting)
    assert started(state, "latency") == [("urgent", 4)]  # four are left, and large wants eight


def test_throughput_gives_each_one_device_where_many_wait_and_all_to_one_alone() -> None:
    many = ScheduleState(now=0.0, devices=8, waiting=tuple(request(number, LARGE) for number in range(12)))
    assert started(many, "throughput") == [(number, 1) for number in range(8)]
    alone = ScheduleState(now=0.0, devices=8, waiting=(request("alone", LARGE),))
    assert started(alone, "throughput") == [("alone", 8)]


def test_deadline_takes_as_few_devices_as_meet_it() -> None:
    waiting = (
        request("tight", LARGE, deadline=3.5),  # 3.2 s on four devices
        request("loose", LARGE, deadline=30.0),
        request("soon", SMALL, deadline=1.5),
        request("hopeless", LARGE, deadline=1.0),  # 2 s on all
    )
    state = ScheduleState(now=0.0, devices=6, waiting=waiting)
    assert started(state, "deadline") == [("soon", 1), ("tight", 4), ("loose", 1)]
    only = ScheduleState(now=0.0, devices=8, waiting=waiting[3:])
    assert started(only, "deadline") == [("hopeless", 8)], "it runs at the end, not never"


def test_devices_that_are_left_go_to_those_that_become_faster() -> None:
    state = ScheduleState(now=0.0, devices=8, waiting=(request("a", deadline=5.0), request("b", LARGE, deadline=20.0)))
    assert started(state, "deadline") == [("a", 4), ("b", 4)]


def test_suspension_saves_a_deadline_and_needs_slack() -> None:
    def state(end: float, slack: float, **facts: float) -> ScheduleState:
        slow = request("slow", LARGE, deadline=end + slack)
        if facts.pop("again", 0):
            slow = WaitingRequest(**{**vars(slow), "suspensions": MAX_SUSPENSIONS})
        running = RunningRequest(request=slow, degree=8, end=end)
        return ScheduleState(
            now=0.0,
            devices=8,
            waiting=(request("urgent", deadline=1.2),),
            running=(running,),
            can_suspend=bool(facts.get("can", 1)),
            resume_seconds=0.5,
        )

    (suspend, start) = deadline(state(5.0, 10.0))
    assert isinstance(suspend, SuspendRequest)
    assert isinstance(start, StartRequest)
    assert (suspend.request.request.name, start.request.name, start.degree) == ("slow", "urgent", 1)
    assert deadline(state(5.0, 0.1)) == (), "it cannot spare that"
    assert deadline(state(5.0, 10.0, can=0)) == (), "the engine cannot"
    assert deadline(state(5.0, 10.0, again=1)) == (), "often enough"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("can_suspend", [False, True])
def test_every_request_ends(policy: str, can_suspend: bool) -> None:
    """Also beyond what the devices can do; none starves, and no device has two requests."""
    for seed in range(4):
        trace = mix(60, 1.5, seed)
        ended = simulate(
            POLICIES[policy], SimulatedCluster(devices=8, can_suspend=can_suspend, resume_seconds=0.1), trace
        )
        assert sorted(str(each.request.name) for each in ended) == sorted(str(each.name) for each in trace)
        assert all(each.starts <= 1 + MAX_SUSPENSIONS for each in ended)


def met(ended: tuple[SimulatedRequest, ...]) -> int:
    return sum(each.is_met for each in ended)


def per_minute(ended: tuple[SimulatedRequest, ...]) -> float:
    return 60 * len(ended) / max(each.end for each in ended)


def test_what_policies_are_worth_on_a_mix() -> None:
    """At a load that single devices can just bear: the figures that the docs quote, on eight devices."""
    trace = mix(200, 0.9)
    ended = {name: simulate(policy, EIGHT, trace) for name, policy in POLICIES.items()}
    assert met(ended["deadline"]) >= 1.5 * met(ended["latency"])
    assert per_minute(ended["throughput"]) >= 1.5 * per_minute(ended["latency"])
    suspending = SimulatedCluster(devices=8, can_suspend=True, resume_seconds=0.3)
    assert met(simulate(deadline, suspending, trace)) > met(ended["deadline"])


def test_where_nothing_waits_latency_is_best() -> None:
    trace = mix(100, 0.02)
    mean = {name: sum(e.seconds for e in simulate(policy, EIGHT, trace)) / 100 for name, policy in POLICIES.items()}
    assert mean["latency"] <= min(mean.values()) * 1.02


def test_a_policy_that_starts_nothing_is_noticed() -> None:
    with pytest.raises(AssertionError, match="starts nothing"):
        simulate(lambda state: (), EIGHT, [request("a")])
    assert latency(ScheduleState(now=0.0, devices=8)) == throughput(ScheduleState(now=0.0, devices=8)) == ()


def ends_of(policy: str, trace: list[WaitingRequest], batch: int = 4, wait: float = 0.5) -> dict[object, float]:
    """When each request of a trace ends on one device. A small one takes 1 s."""
    cluster = SimulatedCluster(devices=1, batch=batch, batch_wait=wait)
    return {each.request.name: each.end for each in simulate(with_batch_wait(POLICIES[policy]), cluster, trace)}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_idle_server_waits_for_a_batch_as_long_as_it_may(policy: str) -> None:
    """Those that come meanwhile are made together; one alone starts when the time is over; without a wait at once."""
    trace = [request("a", batch=1), request("b", arrival=0.4, batch=1), request("c", arrival=0.6, batch=1)]
    assert ends_of(policy, trace) == pytest.approx({"a": 2.5, "b": 2.5, "c": 3.5})
    assert ends_of(policy, trace[:1]) == pytest.approx({"a": 1.5})
    assert ends_of(policy, trace, wait=0.0) == pytest.approx({"a": 1.0, "b": 3.0, "c": 3.0})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_batch_and_other_requests_wait_for_nothing(policy: str) -> None:
    full = [request("a", batch=1), request("b", arrival=0.2, batch=1)]
    assert ends_of(policy, full, batch=2) == pytest.approx({"a": 2.2, "b": 2.2})
    alone = [request("a"), request("b", arrival=0.2)]
    assert ends_of(policy, alone) == pytest.approx({"a": 1.0, "b": 2.0})
    other = [request("a", batch=1), request("b", arrival=0.2)]
    assert min(ends_of(policy, other).values()) == pytest.approx(1.2), "nothing is kept from its devices"


def test_a_deadline_is_not_missed_by_waiting() -> None:
    """The wait ends in time; the control has no deadline."""
    soon = request("a", deadline=1.3, batch=1)
    assert ends_of("deadline", [soon]) == pytest.approx({"a": 1.3})
    assert ends_of("deadline", [request("a", batch=1)]) == pytest.approx({"a": 1.5})
    late = ScheduleState(now=0.0, devices=1, waiting=(request("a", deadline=0.5, batch=1),), batch=4, batch_wait=0.5)
    assert batch_begin(late) is None


def test_a_busy_server_does_not_wait_for_a_batch() -> None:
    """What comes while something runs starts when devices are free, as long as it has waited already."""
    trace = [request("a"), request("b", arrival=0.1, batch=1)]
    assert ends_of("latency", trace, wait=0.5) == pytest.approx({"a": 1.0, "b": 2.0})
