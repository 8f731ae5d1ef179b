"""The two kinds of callbacks in diffusers: `callback_on_step_end`, and the older `callback`.

    callback_on_step_end(pipe, step, timestep, tensors)      may return other tensors
    callback(step, timestep, latents)                        may write to the latents; `callback_steps`: how often

A caller's callback of either kind is asked as the first; the older one where the pipeline has no other, as diffusers
deprecates it elsewhere. Does not import torch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.call_parameters import parameters_of
from patchpar.models.info import PipelineInfo

ON_STEP_END, OLDER = "callback_on_step_end", "callback"
OLD_NAMES = (OLDER, "callback_steps")
LATENTS = "latents"
OnStepEnd = Callable[..., Mapping[str, Any]]


def with_callback_on_step_end(model: PipelineInfo, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call with its `callback` as a `callback_on_step_end`, on which all else depends.

    Raises PlanError for one that is deprecated in this pipeline, or that it does not have at all.
    """
    if OLDER in model.parameters and ON_STEP_END not in model.parameters:
        callback = kwargs.get(OLDER)
        others = {name: value for name, value in kwargs.items() if name != OLDER}
        return kwargs if callback is None else {**others, ON_STEP_END: _of_latents(callback)}
    for name in OLD_NAMES:
        if kwargs.get(name) is not None:
            way_out = f"use {ON_STEP_END}=" if ON_STEP_END in model.parameters else f"{model.pipeline} has no callback"
            raise PlanError(f"{name}= is deprecated in diffusers and not sent to workers: {way_out}")
    return kwargs


def _of_latents(callback: Callable[[int, Any, Any], object]) -> OnStepEnd:
    def on_step_end(_: Any, step: int, timestep: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        callback(step, timestep, tensors[LATENTS])
        return {}

    return on_step_end


def asking(pipe: Any, ask: OnStepEnd) -> dict[str, Any]:
    """Return the argument with which a pipeline asks a `callback_on_step_end` after each step."""
    if ON_STEP_END in parameters_of(type(pipe)):
        return {ON_STEP_END: ask}

    def callback(step: int, timestep: Any, latents: Any) -> None:
        found = ask(pipe, step, timestep, {LATENTS: latents})
        if LATENTS in found:
            latents.copy_(found[LATENTS])

    return {OLDER: callback}
