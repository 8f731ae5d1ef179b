"""Whether a call has failed because the pipeline's scheduler refuses its number of steps, each with rules of its own.

Asked after the call: before it, what a scheduler needs beside the number, such as the shift of the size, is not known.
"""

import copy
from typing import Any

from patchpar.errors import PatchparError


def refusal_of_steps(scheduler: Any, steps: int | None, error: Exception) -> str:
    """Return that a scheduler refuses a number of steps, and why; "" where the error of the call is another one.

    `scheduler`: stays as it is. `steps`: None of a call that has named none.
    """
    if steps is None or isinstance(error, PatchparError) or not hasattr(scheduler, "set_timesteps"):
        return ""
    reason = _said_of(copy.deepcopy(scheduler), steps)
    if not reason or reason not in str(error):
        return ""
    return f"{type(scheduler).__name__}, the scheduler of this model, refuses it ({reason.splitlines()[0].rstrip('.')})"


def _said_of(scheduler: Any, steps: int) -> str:
    """Return what a scheduler says of a number of steps; empty if it takes it."""
    try:
        scheduler.set_timesteps(steps)
    except Exception as refusal:  # noqa: BLE001 - theirs are of any type
        return str(refusal)
    return ""
