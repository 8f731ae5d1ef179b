"""Policies on the queue of a server: its jobs as requests of a schedule, and the start that a policy orders."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

from patchpar.serving.job import Job
from patchpar.serving.job_queue import JobHold, JobStart, JobSuspend, in_order
from patchpar.serving.request_error import RequestError
from patchpar.serving.scheduling.batch_wait import with_batch_wait
from patchpar.serving.scheduling.learnt_costs import CallShape, LearntCosts
from patchpar.serving.scheduling.policies import MAX_SUSPENSIONS, Policy, latency, predicted_end
from patchpar.serving.scheduling.state import (
    NEVER,
    RunningRequest,
    ScheduleState,
    StartRequest,
    SuspendRequest,
    WaitForBatch,
    WaitingRequest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a policy has to know of a job. `steps`: of all its images. `degrees`: the numbers of devices it may have.

    `can_suspend`: whether it can go on later from where it is. `batch_key`: of jobs that can be made in one call.
    `deadline`: on the clock of time.monotonic, in seconds.
    """

    shape: CallShape
    steps: int
    degrees: tuple[int, ...]
    deadline: float = NEVER
    priority: int = 0
    can_suspend: bool = True
    batch_key: Hashable | None = None


PREDICTION_SECONDS = 0.25
"""So long a prediction of the queue's end is used: who is refused often does not have it made each time."""
RESUME_SECONDS = 1.0
"""What it takes to go on with a suspended request: its prompt is encoded, and its steps are replayed."""


class JobScheduler:
    """Chooses the next job of a queue by a policy, with costs that it learns."""

    def __init__(self, policy: Policy, devices: int, costs: LearntCosts) -> None:
        self._policy, self._in_batches = policy, with_batch_wait(policy)
        self.devices, self.costs = devices, costs
        self._predicted = 0.0, 0.0  # when a prediction was made, and the end that it says
        self.batch = 1
        """Most requests of one call."""
        self.batch_wait = 0.0
        """Seconds for which an idle server waits for more of them."""

    def choose(
        self, free: int, waiting: Sequence[Job], running: Sequence[Job]
    ) -> JobStart | JobSuspend | JobHold | None:
        """Return the job to start now, with its number of devices, or one to suspend; None to wait for others to end.

        While one is being suspended, nothing takes the devices from the job that it makes room for.
        """
        if any(job.is_suspending for job in running):
            return None
        if not all(isinstance(job.facts, JobFacts) for job in waiting):
            return in_order(free, waiting, running)  # the first call of the server is among them
        state = self._state(waiting, running)
        first = next(iter(self._in_batches(state)), None)
        if isinstance(first, StartRequest):
            job = first.request.name
            return JobStart(job, first.degree, self._peers(job, waiting))
        if isinstance(first, WaitForBatch):
            return JobHold(first.until - state.now)
        return JobSuspend(first.request.request.name) if isinstance(first, SuspendRequest) else None

    def _state(self, waiting: Sequence[Job], running: Sequence[Job]) -> ScheduleState:
        """Return what the policy has to know. `waiting`: jobs with facts."""
        now = time.monotonic()
        known = [job for job in running if isinstance(job.facts, JobFacts) and job.takes]
        return ScheduleState(
            now=now,
            devices=self.devices,
            waiting=tuple(self._request(job) for job in waiting),
            running=tuple(self._running(job, now) for job in known),
            busy=sum(job.takes for job in running if job not in known),
            can_suspend=True,
            resume_seconds=RESUME_SECONDS,
            batch=self.batch,
            batch_wait=self.batch_wait,
        )

    def seconds_left(self, waiting: Sequence[Job], running: Sequence[Job]) -> float:
        """Return how long it takes, as predicted, until all these jobs have ended, and one that comes now can begin."""
        now = time.monotonic()
        made, end = self._predicted
        if now > made + PREDICTION_SECONDS:
            state = self._state([job for job in waiting if isinstance(job.facts, JobFacts)], running)
            end = predicted_end(state, widest=self._policy is latency)
            self._predicted = now, end
        return max(0.0, end - now)

    def _peers(self, job: Job, waiting: Sequence[Job]) -> tuple[Job, ...]:
        """Return the jobs that wait and can be made in one call with this one, in order."""
        key = job.facts.batch_key
        if key is None or job.kept is not None:
            return ()
        alike = (each for each in waiting if each is not job and each.facts.batch_key == key and each.kept is None)
        return tuple(islice(alike, self.batch - 1))

    def check_deadline(self, facts: JobFacts) -> None:
        """Raise RequestError, 504, for a deadline that nothing can meet, as far as calls like it have been measured."""
        fastest = self.costs.costs(facts.shape, self._degrees(facts))
        degree = fastest.degrees[-1]
        predicted = fastest.seconds(degree, facts.steps)
        left = facts.deadline - time.monotonic()
        if self.costs.is_measured(facts.shape, degree) and predicted > left:
            raise RequestError(
                f"deadline_ms: {facts.steps} steps of this size take about {predicted:.2g} s on {degree} devices, and "
                f"{left:.2g} s are left: allow more time, or ask for fewer steps or a smaller size",
                status=504,
                param="deadline_ms",
                code="deadline_unreachable",
                is_final=True,
            )

    def _degrees(self, facts: JobFacts) -> tuple[int, ...]:
        """Return the numbers of devices that a request may have now: fewer than it could have, where some are gone."""
        return tuple(each for each in facts.degrees if each <= self.devices) or (self.devices,)

    def _request(self, job: Job) -> WaitingRequest:
        facts: JobFacts = job.facts
        return WaitingRequest(
            name=job,
            arrival=job.submitted,
            steps=max(1, facts.steps - job.done_steps),
            costs=self.costs.costs(facts.shape, self._degrees(facts)),
            deadline=facts.deadline,
            priority=facts.priority,
            suspensions=job.suspensions if facts.can_suspend and not job.peers else MAX_SUSPENSIONS,
            batch_key=facts.batch_key if job.kept is None else None,
        )

    def _running(self, job: Job, now: float) -> RunningRequest:
        request = self._request(job)
        degree = min(request.costs.steps, key=lambda each: abs(each - job.takes))
        return RunningRequest(request=request, degree=job.takes, end=now + request.costs.seconds(degree, request.steps))


def check_not_late(job: Job) -> None:
    """Raise RequestError, 504, for a job whose deadline has passed while it waited. One that has begun goes on."""
    late = time.monotonic() - job.facts.deadline
    if late > 0 and not job.suspensions:
        raise RequestError(
            f"deadline_ms: the deadline passed {late:.2g} s before devices were free: allow more time, or come later",
            status=504,
            param="deadline_ms",
            code="deadline_missed",
            is_final=True,
        )
