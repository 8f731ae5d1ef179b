"""Policies: which requests start now, on how many devices. Pure functions of the state.

latency     the first by priority, deadline and arrival gets the devices on which it ends first, before any other starts
throughput  groups of devices with which all that wait end first, as FlexSP asks it for sequences (arXiv:2412.01523):
            each starts with one device, and the request that ends last gets twice as many while that helps all
deadline    the earliest deadline first, on as few devices as meet it, so that others meet theirs beside it; what is
            left goes to those that become faster. Requests that cannot meet theirs any more come last. Suspends the
            request with most slack where that saves a deadline

A policy always starts something if nothing runs and something waits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from patchpar.serving.scheduling.state import Action, ScheduleState, StartRequest, SuspendRequest, WaitingRequest

Policy = Callable[[ScheduleState], tuple[Action, ...]]
WINDOW = 16
"""So many of the oldest requests are planned together."""
MAX_SUSPENSIONS = 2


def latency(state: ScheduleState) -> tuple[Action, ...]:
    """See the module."""
    free, found = state.free, list[Action]()
    for request in sorted(state.waiting, key=lambda each: (-each.priority, each.deadline, each.arrival)):
        wanted = _within(request, state.devices)
        if wanted > free:
            break  # not overtaken
        found.append(StartRequest(request, wanted))
        free -= wanted
    return tuple(found)


def throughput(state: ScheduleState) -> tuple[Action, ...]:
    """See the module."""
    order = sorted(state.waiting, key=lambda each: (-each.priority, each.arrival))[:WINDOW]
    degrees = _shortest(state, order)
    free, found = state.free, list[Action]()
    for request, degree in zip(order, degrees, strict=True):
        if degree > free:
            break  # not overtaken, so that none waits for ever
        found.append(StartRequest(request, degree))
        free -= degree
    return tuple(found)


def _shortest(state: ScheduleState, order: Sequence[WaitingRequest]) -> list[int]:
    """Return the numbers of devices of requests with which the last of them ends first, found by doubling."""
    degrees = [request.degrees[0] for request in order]
    end, last = _end_of(state, order, degrees)
    while last is not None:
        larger = _next_degree(order[last], degrees[last], state.devices)
        if larger is None:
            break
        tried = [larger if number == last else degree for number, degree in enumerate(degrees)]
        tried_end, tried_last = _end_of(state, order, tried)
        if tried_end >= end:
            break
        degrees, end, last = tried, tried_end, tried_last
    return degrees


def _end_of(state: ScheduleState, order: Sequence[WaitingRequest], degrees: Sequence[int]) -> tuple[float, int | None]:
    """Return when the last request ends, and which it is, if each starts as soon as its devices are free, in order."""
    free_at = [state.now] * (state.devices - sum(each.degree for each in state.running))
    free_at += [max(each.end, state.now) for each in state.running for _ in range(each.degree)]
    heapify(free_at)
    last, end, number_of_last = 0.0, 0.0, None
    for number, (request, degree) in enumerate(zip(order, degrees, strict=True)):
        start = max(last, sorted(free_at)[degree - 1])  # in order: not before the one before it
        last, over = start, start + request.seconds(degree)
        for _ in range(degree):
            heapreplace(free_at, over)
        if over > end:
            end, number_of_last = over, number
    return end, number_of_last


def deadline(state: ScheduleState) -> tuple[Action, ...]:
    """See the module."""
    free, starts = state.free, list[StartRequest]()
    order = sorted(state.waiting, key=lambda each: (each.deadline, -each.priority, each.arrival))
    can, late = list[WaitingRequest](), list[WaitingRequest]()
    for request in order:
        (can if _least(request, state.now, state.devices) is not None else late).append(request)
    for request in can:
        degree = _least(request, state.now, free)
        if degree is None:
            preempted = None if starts else _preempted_for(request, state, free)
            if preempted is not None:
                return preempted
            continue  # those after it may end before its devices are free
        starts.append(StartRequest(request, degree))
        free -= degree
    if not can:
        for request in sorted(late, key=lambda each: (-each.priority, each.arrival)):
            degree = request.degrees[0]
            if degree <= free:
                starts.append(StartRequest(request, degree))
                free -= degree
    return tuple(_widened(starts, free)) or _first_of_all(state, order)


def _least(request: WaitingRequest, now: float, free: int) -> int | None:
    """Return the smallest number of free devices that meets the deadline."""
    fitting = (each for each in request.degrees if each <= free)
    return next((each for each in fitting if now + request.seconds(each) <= request.deadline), None)


def _preempted_for(request: WaitingRequest, state: ScheduleState, free: int) -> tuple[Action, ...] | None:
    """Return the suspension of the running request with most slack that lets this one start and meet its deadline.

    None if no one can spare that. Nothing is suspended more than MAX_SUSPENSIONS times.
    """
    if not state.can_suspend:
        return None
    for each in sorted(state.running, key=lambda running: -running.slack):
        degree = _least(request, state.now, free + each.degree)
        spared = each.request.suspensions < MAX_SUSPENSIONS
        if degree is not None and spared and each.slack > request.seconds(degree) + state.resume_seconds:
            return SuspendRequest(each), StartRequest(request, degree)
    return None


def predicted_end(state: ScheduleState, *, widest: bool) -> float:
    """Return when all that runs and waits has ended, if nothing else comes: each starts once its devices are free.

    `widest`: on the devices on which it ends first, else on as few as may be, as policies have it for a long queue.
    """
    order = sorted(state.waiting, key=lambda each: (-each.priority, each.arrival))
    degrees = [_within(request, state.devices) if widest else request.degrees[0] for request in order]
    end, _ = _end_of(state, order, degrees)
    return max([state.now, end, *(each.end for each in state.running)])


def _widened(starts: Sequence[StartRequest], free: int) -> list[StartRequest]:
    """Give devices that are left to the starts that become faster by them, the first ones first."""
    found = []
    for start in starts:
        degree = start.request.largest(start.degree + free) or start.degree
        free -= degree - start.degree
        found.append(replace(start, degree=degree))
    return found


def _first_of_all(state: ScheduleState, order: Sequence[WaitingRequest]) -> tuple[Action, ...]:
    """Start something where nothing runs."""
    if state.running or not order or order[0].degrees[0] > state.free:
        return ()
    return (StartRequest(order[0], order[0].largest(state.free) or order[0].degrees[0]),)


def _within(request: WaitingRequest, devices: int) -> int:
    return request.largest(devices) or request.degrees[0]


def _next_degree(request: WaitingRequest, degree: int, devices: int) -> int | None:
    return next((each for each in request.degrees if degree < each <= devices), None)


POLICIES: Mapping[str, Policy] = {"latency": latency, "throughput": throughput, "deadline": deadline}
