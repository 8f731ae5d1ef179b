"""The tree of a denoiser's output as JSON, and back: lists, tuples, dicts, outputs of diffusers, and plain values."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from diffusers.utils import BaseOutput
from torch import Tensor

from patchpar.comm.pytree import entries
from patchpar.errors import ReplayMismatch, UnsupportedModel

PLAIN = (bool, int, float, str, type(None))
LIBRARY = "diffusers."


def form_of(tree: Any) -> Any:
    """Return the tree of an output for JSON, with its tensors numbered. Raises UnsupportedModel for other objects."""
    count = 0

    def form(each: Any) -> Any:
        nonlocal count
        if isinstance(each, Tensor):
            count += 1
            return {"tensor": count - 1}
        if isinstance(each, PLAIN):
            return {"value": each}
        if type(each) in (list, tuple):
            return {type(each).__name__: [form(item) for item in each]}
        if type(each) is dict and all(isinstance(name, str) for name in each):
            return {"dict": {name: form(item) for name, item in each.items()}}
        if isinstance(each, BaseOutput) and type(each).__module__.startswith(LIBRARY):
            fields = {name: form(item) for name, item in entries(each).items()}
            return {"output": [type(each).__module__, type(each).__name__], "fields": fields}
        raise UnsupportedModel(f"a denoiser returns a {type(each).__name__}, which cannot be recorded")

    return form(tree)


def tree_of(form: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the output of a form, with `tensors` of any shape. Raises ReplayMismatch for one that is none."""
    try:
        return _built(form, tensors)
    except (ImportError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ReplayMismatch(f"a recorded output cannot be built here: {error!r}") from error


def _built(form: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    (kind, held), *fields = form.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "value":
        return held
    if kind in ("list", "tuple"):
        items = [_built(item, tensors) for item in held]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {name: _built(item, tensors) for name, item in held.items()}
    values = {name: _built(item, tensors) for name, item in dict(fields)["fields"].items()}
    return _class_of(*held)(**values)


def _class_of(module: str, name: str) -> type[BaseOutput]:
    """Return a class of outputs. Raises ValueError for one that is not diffusers'."""
    found = getattr(import_module(module), name) if module.startswith(LIBRARY) else None
    if not (isinstance(found, type) and issubclass(found, BaseOutput)):
        raise ValueError(f"{module}.{name} is no output of diffusers")
    return found
