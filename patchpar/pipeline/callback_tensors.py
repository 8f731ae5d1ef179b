"""The tensors that a callback_on_step_end gets, and which of them it has changed. Does not import torch."""

from collections.abc import Collection, Mapping
from typing import Any

from patchpar.errors import PlanError


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


def refuse_for_some_prompts(changed: Collection[str], groups: int) -> None:
    """Raise PlanError for tensors that a callback has `changed`, of which it got those of the first group only."""
    if changed and groups > 1:
        raise PlanError(
            f"callback_on_step_end has changed {', '.join(sorted(changed))}, but with data={groups} it gets those of "
            "the first prompts only: use data=1"
        )
