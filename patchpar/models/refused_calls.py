"""Whether a call has failed because the pipeline refuses its arguments, each class and scheduler with rules of its own.

Asked after the call: before it, what a scheduler needs beside the number, such as the shift of the size, is not known.
"""

import copy
import re
import traceback
from pathlib import Path
from typing import Any

from patchpar.errors import PatchparError

RAISED = re.compile(r'^ *File "(.*)", line \d+, in \w+\n *(.*)$', re.MULTILINE)
"""A frame of a traceback as text, which is what is left of one of a worker: its file and its line."""


def refusal_of_steps(scheduler: Any, steps: int | None, error: Exception) -> str:
    """Return that a scheduler refuses a number of steps, and why; "" where the error of the call is another one.

    `scheduler`: stays as it is. `steps`: None of a call that has named none.
    """
    if steps is None or isinstance(error, PatchparError) or not hasattr(scheduler, "set_timesteps"):
        return ""
    reason = _reason_against(copy.deepcopy(scheduler), steps)
    if not reason or reason not in str(error):
        return ""
    return f"{type(scheduler).__name__}, the scheduler of this model, refuses it ({reason.splitlines()[0].rstrip('.')})"


def _reason_against(scheduler: Any, steps: int) -> str:
    """Return what a scheduler says of a number of steps; empty if it takes it."""
    try:
        scheduler.set_timesteps(steps)
    except Exception as refusal:  # noqa: BLE001 - theirs are of any type
        return str(refusal)
    return ""


def refusal_by_diffusers(error: Exception) -> str:
    """Return what diffusers' own code says of a call that it refuses; "" where the error comes from anything else.

    Refused is what one of its `raise` statements ends, most of them in `check_inputs` of a pipeline.
    """
    if not isinstance(error, (ValueError, TypeError)):
        return ""
    frames = [(each.filename, each.line or "") for each in traceback.extract_tb(error.__traceback__)]
    of_worker = RAISED.findall(str(error.__cause__ or ""))
    last = (*frames[-1:], *of_worker[-1:])
    is_refused = any("diffusers" in Path(file).parts and line.startswith("raise ") for file, line in last)
    return str(error) if is_refused else ""
