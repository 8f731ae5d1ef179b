"""The two kinds of callbacks in diffusers: `callback_on_step_end`, and the older `callback`.

    callback_on_step_end(pipe, step, timestep, tensors)      may return other tensors
    callback(step, timestep, latents)                        may write to the latents; `callback_steps`: how often

A caller's callback of either kind is asked as the first; the older one where the pipeline has no other, as diffusers
deprecates it elsewhere. And which of the tensors that it got it has changed. Does not import torch.
"""

from collections.abc import Callable, Collection, Mapping
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


class CallbackTensors:
    """Tensors, of any shape, by name, before a callback gets them."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._before = dict(tensors)
        self._states = {name: _state_of(value) for name, value in tensors.items()}

    def changed(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return those that are others in the callback's `answer`, or that it has written to, answered or not."""
        return {name: value for name, value in {**self._before, **answer}.items() if not self._is_same(name, value)}

    def _is_same(self, name: str, value: Any) -> bool:
        if name not in self._before or value is not self._before[name]:
            return False
        state = self._states[name]
        return bool(value.equal(state)) if _is_uncounted(value) else _state_of(value) == state


def _state_of(value: Any) -> Any:
    """Return how often a tensor, of any shape, was written to, or a copy of one that does not count it."""
    return value.clone() if _is_uncounted(value) else getattr(value, "_version", 0)


def _is_uncounted(value: Any) -> bool:
    """Whether this is a tensor of inference mode, which raises when it is asked for its version."""
    return hasattr(value, "is_inference") and bool(value.is_inference())


def checked_answer(answer: Any) -> Mapping[str, Any]:
    """Return what a callback has returned. Raises PlanError unless it is a dict, or nothing."""
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        raise PlanError(
            f"callback_on_step_end has returned {answer!r:.80}, of type {type(answer).__name__}: return the dict of "
            "tensors that it gets, or one of those that it has changed, or nothing"
        )
    return answer


def refuse_for_some_prompts(changed: Collection[str], groups: int) -> None:
    """Raise PlanError for tensors that a callback has `changed`, of which it got those of the first group only."""
    if changed and groups > 1:
        raise PlanError(
            f"callback_on_step_end has changed {', '.join(sorted(changed))}, but with data={groups} it gets those of "
            "the first prompts only: use data=1"
        )
