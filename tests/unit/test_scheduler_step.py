"""What stands in place of a scheduler's step: copies of the scheduler step themselves, and the clock knows of it."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from patchpar.comm.traffic import CommStats
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.pipeline_call import PipelineCall
from patchpar.pipeline.stats_recorder import StatsRecorder
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.scheduler_step import SchedulerStepOverride, WithinSteps
from tests.contexts import ThreadContext

SCHEDULERS = (diffusers.FlowMatchEulerDiscreteScheduler, diffusers.UniPCMultistepScheduler)


class Pipe:
    """A pipeline that is nothing but its scheduler and its loop."""

    def __init__(self, scheduler: Any, loop: Any) -> None:
        self.scheduler, self.loop = scheduler, loop
        self.components = {"scheduler": scheduler}

    def __call__(self) -> Any:
        return self.loop(self.scheduler)


def scheduler_of(kind: Any) -> Any:
    scheduler = kind()
    scheduler.set_timesteps(4)
    return scheduler


def run(pipe: Pipe, clock: StepClock) -> Any:
    context = ThreadContext()
    options = CallOptions(plan=Plan())
    return PipelineCall(pipe, context, clock, options, StatsRecorder(CommStats(), (), tracing=False)).run({})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_image_and_audio_step_in_turn(kind: Any) -> None:
    """The sound's scheduler is a copy: each has the steps it would have without us, one tick for both."""

    def loop(scheduler: Any) -> list[torch.Tensor]:
        audio = copy.deepcopy(scheduler)
        x, y = torch.ones(1, 4), torch.full((1, 4), 2.0)
        for t in scheduler.timesteps:
            clock.next_call()
            x = scheduler.step(0.1 * x, t, x, return_dict=False)[0]
            y = audio.step(0.2 * y, t, y, return_dict=False)[0]
        return [x, y]

    clock = StepClock()
    want = loop(scheduler_of(kind))
    clock.reset()
    got = run(Pipe(scheduler_of(kind), loop), clock)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert clock.evaluation == 4


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_for_every_frame(kind: Any) -> None:
    """The original never steps; what was predicted at once is one evaluation."""

    def loop(scheduler: Any) -> list[torch.Tensor]:
        each = [copy.deepcopy(scheduler) for _ in range(3)]
        frames = [torch.full((1, 4), float(number + 1)) for number in range(3)]
        for t in scheduler.timesteps:
            clock.next_call()
            clock.next_call()
            frames = [own.step(0.1 * x, t, x, return_dict=False)[0] for own, x in zip(each, frames, strict=True)]
        return frames

    clock = StepClock()
    want = loop(scheduler_of(kind))
    clock.reset()
    got = run(Pipe(scheduler_of(kind), loop), clock)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert clock.evaluation == 4


def test_it_looks_like_the_step_and_leaves_no_trace() -> None:
    scheduler = scheduler_of(SCHEDULERS[0])
    signature = inspect.signature(scheduler.step)
    scheduler.step = SchedulerStepOverride(scheduler, lambda step, *args, **kwargs: step(*args, **kwargs))
    assert inspect.signature(scheduler.step) == signature
    other = copy.deepcopy(scheduler)
    assert other.step.__self__ is other
    del scheduler.step
    assert "step" not in vars(scheduler)


def test_one_in_the_place_of_another_runs_both() -> None:
    """Structure guidance stands before what the clock ticks by."""
    scheduler = scheduler_of(diffusers.FlowMatchEulerDiscreteScheduler)
    ran: list[str] = []

    def noting(name: str) -> Any:
        def run(step: Any, *args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return step(*args, **kwargs)

        return run

    for name in ("inner", "outer"):
        scheduler.step = SchedulerStepOverride(scheduler, noting(name))
    x = torch.ones(1, 4)
    stepped = scheduler.step(0.1 * x, scheduler.timesteps[0], x, return_dict=False)[0]
    assert ran == ["outer", "inner"]
    plain = scheduler_of(diffusers.FlowMatchEulerDiscreteScheduler)
    assert torch.equal(stepped, plain.step(0.1 * x, plain.timesteps[0], x, return_dict=False)[0])


STEPS = 200


class Following(WithinSteps):
    """Notes the number of the next step in each step."""

    def begin(self, scheduler: Any) -> list[int | None]:
        found: list[int | None] = []

        def run(step: Any, output: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
            following = self._next(timestep)
            found.append(following and following[0])
            return step(output, timestep, *args, **kwargs)

        self._override(scheduler, run)
        return found


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.PNDMScheduler(skip_prk_steps=True),
        diffusers.DPMSolverMultistepScheduler(use_karras_sigmas=True),
        diffusers.DDIMScheduler(),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
@pytest.mark.parametrize("first", [0, 7])
def test_the_step_that_follows(scheduler: Any, first: int) -> None:
    """Also where a timestep is there twice: PNDM's second, and what solvers round to the same."""
    scheduler.set_timesteps(STEPS)
    times, following = scheduler.timesteps[first:], Following()
    assert isinstance(scheduler, diffusers.DDIMScheduler) or len(set(times.tolist())) < len(times) or first
    for _ in range(2):
        found = following.begin(scheduler)
        for time in times:
            scheduler.step(torch.ones(1, 4), time, torch.ones(1, 4))
        assert found == [*range(first + 1, first + len(times)), None]
        following.end()
        scheduler.set_timesteps(STEPS)


def test_a_scheduler_that_steps_by_other_names_steps_as_it_does() -> None:
    """ScoreSdeVeScheduler predicts and corrects. Nothing tells when its steps end."""
    scheduler, clock = SimpleNamespace(step_pred=lambda x: x + 1), StepClock()
    assert run(Pipe(scheduler, lambda scheduler: scheduler.step_pred(1)), clock) == 2
    assert clock.evaluation == 0
