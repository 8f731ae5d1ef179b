"""Guiders of diffusers: components that say how many guidance branches a pipeline calls its denoiser for."""

from typing import Any

GUIDER = "guider"


def guider_branches(pipe: Any) -> int | None:
    """Return the number of guidance branches by the pipeline's guider; None for a class of pipelines without guiders.

    Counted by a new guider of the same configuration: this one may be in the last step of a call, without guidance.
    """
    if GUIDER not in pipe.components:
        return None
    guider = pipe.components[GUIDER]
    if guider is None or not getattr(guider, "_enabled", True):  # what `disable()` sets
        return 1
    return int(guider.new().num_conditions)
