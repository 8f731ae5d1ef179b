"""Override of a scheduler's step during a pipeline call.

diffusers copies its scheduler for latents denoised beside the image: the audio of a video, or every frame where frames
have different timesteps. A plain function in its place would be copied with it, and step the original.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError

Step = Callable[..., Any]


class SchedulerStepOverride:
    """Calls `run(step, ...)` for `scheduler.step(...)`; a copy of the scheduler steps itself, or by `in_copies`."""

    def __init__(self, scheduler: Any, run: Step, in_copies: Step | None = None, *, before: Step | None = None) -> None:
        self._before: Step = scheduler.step if before is None else before
        self._scheduler, self._run, self._in_copies = scheduler, run, in_copies
        # diffusers reads the signature of scheduler.step. No attributes are copied: the old step may be one of these.
        functools.update_wrapper(self, self._before, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        return self._run(self._before, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        """Return the step of a copy of the scheduler."""
        before: Step = copy.deepcopy(self._before, memo)
        if self._in_copies is None:
            return before
        return SchedulerStepOverride(
            copy.deepcopy(self._scheduler, memo), self._in_copies, self._in_copies, before=before
        )


class WithinSteps:
    """Work at every step of a scheduler, whose `step` is overridden until `end`."""

    _scheduler: Any = None
    _stepped = 0  # timesteps up to that of the last step

    def _override(self, scheduler: Any, run: Step) -> None:
        """Call `run(step, ...)` where `scheduler.step(...)` is called."""
        self._scheduler, self._stepped = scheduler, 0
        scheduler.step = SchedulerStepOverride(scheduler, run)

    def end(self) -> None:
        """Restore `scheduler.step`."""
        if self._scheduler is not None:
            vars(self._scheduler).pop("step", None)
        self._scheduler = None

    def _next(self, timestep: Any) -> tuple[int, Any] | None:
        """Return the number and the timestep of the step after the one at `timestep`; None after the last.

        Call it once in each step: PNDM and solvers that round have the same timestep in several.
        """
        times = self._scheduler.timesteps
        apart = (times - torch.as_tensor(timestep).to(times)).abs()
        same = (apart == apart.min()).nonzero().flatten().tolist()
        index = self._stepped = next((each for each in same if each >= self._stepped), same[0]) + 1
        return (index, times[index]) if index < len(times) else None


def refuse_second_order(scheduler: Any, option: str, way_out: str) -> None:
    """Raise PlanError for a second-order scheduler, which splits a step in two."""
    if getattr(scheduler, "order", 1) != 1:
        raise PlanError(f"{option}: {type(scheduler).__name__} is of second order: use another, or {way_out}")


def sample_in(result: Any) -> Tensor:
    """Return the latents in the result of a step, of any shape."""
    return result[0] if isinstance(result, tuple) else result.prev_sample


def with_sample(result: Any, sample: Tensor) -> Any:
    """Return the result with the latents `sample`, of any shape, in their place."""
    if isinstance(result, tuple):
        return (sample, *result[1:])
    result.prev_sample = sample
    return result
