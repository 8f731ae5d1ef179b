"""How many guidance branches a pipeline calls its denoiser for: by its guider, or from which guidance scale on two."""

import math
from typing import Any

GUIDER = "guider"
"""A component of some pipelines, a guider of diffusers."""
GUIDES = "do_classifier_free_guidance"
"""A property of other pipelines, which compares the scale of a call with a number."""


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


def step_branches(pipe: Any, guided: bool | None) -> int:
    """Return the number of guidance branches of a running call, 1 without guidance or where it is not known.

    `guided`: whether there is guidance, if that is known.
    """
    by_guider = guider_branches(pipe)
    return (2 if guided else 1) if by_guider is None else by_guider


def is_smoothed(pipe: Any) -> bool:
    """Return whether the pipeline's guider blurs queries in some calls of the denoiser, from one to the next."""
    guider = getattr(pipe, GUIDER, None)
    if guider is None:
        return False
    from diffusers.guiders import SmoothedEnergyGuidance  # here, since pipelines are described without diffusers

    return isinstance(guider, SmoothedEnergyGuidance)


def guides_above(pipe: Any) -> float:
    """Return the guidance scale above which a pipeline applies guidance: 1, 0 as Z-Image, or infinity for never.

    Pipelines of distilled models may apply none at any scale. 1 also for those whose property GUIDES does not say it.
    """
    found = getattr(type(pipe), GUIDES, None)
    guides: Any = getattr(found, "fget", None)
    if guides is None:
        return 1.0
    at_one, above = _ScaledPipeline(pipe, 1.0), _ScaledPipeline(pipe, 1.5)
    try:
        least = 0.0 if guides(at_one) else 1.0 if guides(above) else math.inf
    except (AttributeError, TypeError):  # it asks for what only a call sets
        return 1.0
    return least if at_one.was_asked else 1.0


class _ScaledPipeline:
    """A pipeline in a call whose guidance scales all have one value. `was_asked`: for a scale."""

    def __init__(self, pipe: Any, scale: float) -> None:
        self._pipe, self._value, self.was_asked = pipe, scale, False

    def __getattr__(self, name: str) -> Any:
        """Return that scale, or an attribute of the pipeline. Raises AttributeError."""
        if name.endswith("guidance_scale"):
            self.was_asked = True
            return self._value
        return getattr(self._pipe, name)
