"""What a policy knows and what it can order. Times are in seconds on one clock, whichever it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a denoising step of one shape by number of devices."""

    steps: Mapping[int, float]

    @property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of devices that are worth a call, ascending: each is faster than all before it."""
        found: list[int] = []
        for degree in sorted(self.steps):
            if not found or self.steps[degree] < self.steps[found[-1]]:
                found.append(degree)
        return tuple(found)

    def seconds(self, degree: int, steps: int) -> float:
        """Return the seconds of a call with so many steps on so many devices."""
        return steps * self.steps[degree]


@dataclass(frozen=True, kw_only=True)
class WaitingRequest:
    """A request that waits. `steps`: those still to be done. `suspensions`: how often it was suspended.

    `batch_key`: of requests that can be made in one call; None for one that is made alone.

    `arrival` and `deadline` in seconds of one clock.
    """

    name: Any
    arrival: float
    steps: int
    costs: StepCosts
    deadline: float = NEVER
    priority: int = 0
    suspensions: int = 0
    batch_key: Any = None

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of devices that it may have, ascending, each faster than those before it."""
        return self.costs.degrees

    def seconds(self, degree: int) -> float:
        """Return how long it takes on so many devices."""
        return self.costs.seconds(degree, self.steps)

    def largest(self, free: int) -> int | None:
        """Return the largest number of devices, of those that it may have, that are free; None if there is none."""
        return next((degree for degree in reversed(self.degrees) if degree <= free), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRequest:
    """A request that runs on `degree` devices and is predicted to end at `end`."""

    request: WaitingRequest
    degree: int
    end: float

    @property
    def slack(self) -> float:
        """How much later it could end."""
        return self.request.deadline - self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleState:
    """Now: requests that wait, in order of arrival, and those that run on some of `devices`.

    `can_suspend`: whether a running one can be suspended, to go on later from the step that it has reached, after
    `resume_seconds` in addition. `batch`: most requests of one call; `batch_wait`: seconds to wait for them.
    """

    now: float
    devices: int
    waiting: tuple[WaitingRequest, ...] = ()
    running: tuple[RunningRequest, ...] = ()
    can_suspend: bool = False
    resume_seconds: float = 0.0
    busy: int = 0
    batch: int = 1
    batch_wait: float = 0.0

    @property
    def free(self) -> int:
        """Number of devices on which nothing runs. `busy`: those that work on something else."""
        return self.devices - self.busy - sum(each.degree for each in self.running)


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Start a waiting request on so many devices."""

    request: WaitingRequest
    degree: int


@dataclass(frozen=True, slots=True)
class SuspendRequest:
    """Suspend a running request at its next denoiser call. It waits again with the steps that are left."""

    request: RunningRequest


@dataclass(frozen=True, slots=True)
class WaitForBatch:
    """Start nothing until then, unless something comes or ends before."""

    until: float


Action = StartRequest | SuspendRequest | WaitForBatch
