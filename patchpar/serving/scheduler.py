"""Policies on the queue of a server: its jobs as requests of a schedule, and the start that a policy orders."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from patchpar.serving.job import Job
from patchpar.serving.job_queue import JobStart, in_order
from patchpar.serving.request_error import RequestError
from patchpar.serving.scheduling.learnt_costs import CallShape, LearntCosts
from patchpar.serving.scheduling.policies import Policy
from patchpar.serving.scheduling.state import NEVER, RunningRequest, ScheduleState, StartRequest, WaitingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a policy has to know of a job. `steps`: of all its images. `degrees`: the numbers of devices it may have.

    `deadline`: on the clock of time.monotonic, in seconds.
    """

    shape: CallShape
    steps: int
    degrees: tuple[int, ...]
    deadline: float = NEVER
    priority: int = 0


class JobScheduler:
    """Chooses the next job of a queue by a policy, with costs that it learns."""

    def __init__(self, policy: Policy, devices: int, costs: LearntCosts) -> None:
        self._policy, self._devices, self.costs = policy, devices, costs

    def choose(self, free: int, waiting: Sequence[Job], running: Sequence[Job]) -> JobStart | None:
        """Return the job to start now, with its number of devices; None to wait for others to end."""
        if not all(isinstance(job.facts, JobFacts) for job in waiting):
            return in_order(free, waiting, running)  # the first call of the server is among them
        now = time.monotonic()
        known = [job for job in running if isinstance(job.facts, JobFacts)]
        state = ScheduleState(
            now=now,
            devices=self._devices,
            waiting=tuple(self._request(job) for job in waiting),
            running=tuple(self._running(job, now) for job in known),
            busy=sum(job.takes for job in running if job not in known),
        )
        starts = [each for each in self._policy(state) if isinstance(each, StartRequest)]
        return JobStart(starts[0].request.name, starts[0].degree) if starts else None

    def check_deadline(self, facts: JobFacts) -> None:
        """Raise RequestError, 504, for a deadline that nothing can meet, as far as calls like it have been measured."""
        fastest = self.costs.costs(facts.shape, facts.degrees)
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
            )

    def _request(self, job: Job) -> WaitingRequest:
        facts: JobFacts = job.facts
        return WaitingRequest(
            name=job,
            arrival=job.submitted,
            steps=facts.steps,
            costs=self.costs.costs(facts.shape, facts.degrees),
            deadline=facts.deadline,
            priority=facts.priority,
        )

    def _running(self, job: Job, now: float) -> RunningRequest:
        request = self._request(job)
        started = job.submitted + job.queued_seconds if job.queued_seconds else now
        end = started + request.costs.seconds(
            min(request.costs.steps, key=lambda each: abs(each - job.takes)), request.steps
        )
        return RunningRequest(request=request, degree=job.takes, end=max(now, end))


def check_not_late(facts: JobFacts) -> None:
    """Raise RequestError, 504, for a job whose deadline has passed while it waited."""
    late = time.monotonic() - facts.deadline
    if late > 0:
        raise RequestError(
            f"deadline_ms: the deadline passed {late:.2g} s before devices were free: allow more time, or come later",
            status=504,
            param="deadline_ms",
            code="deadline_missed",
        )
