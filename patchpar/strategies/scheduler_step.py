"""What stands in place of a scheduler's step while a call runs.

diffusers copies its scheduler for what is denoised beside the picture: the sound of a film, or every frame where frames
have times of their own. A plain function put there would be copied with it, and step the original.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

Step = Callable[..., Any]


class SchedulerStepOverride:
    """Runs `run(step, ...)` where `scheduler.step(...)` is called, `step` being what was there before.

    A copy of the scheduler steps itself, through `in_copies` where that is given.
    """

    def __init__(self, scheduler: Any, run: Step, in_copies: Step | None = None, *, before: Step | None = None) -> None:
        self._before: Step = scheduler.step if before is None else before
        self._scheduler, self._run, self._in_copies = scheduler, run, in_copies
        # diffusers reads the signature of scheduler.step. Not its attributes: what is there may be one of these.
        functools.update_wrapper(self, self._before, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        return self._run(self._before, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        """What stands there in a copy of the scheduler, which is being made."""
        before: Step = copy.deepcopy(self._before, memo)
        if self._in_copies is None:
            return before
        return SchedulerStepOverride(
            copy.deepcopy(self._scheduler, memo), self._in_copies, self._in_copies, before=before
        )
