"""What two blocks of a network have in common that do the same, whatever the values of their weights."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from patchpar.shard.module_tree import modules_of, named_modules_of

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
OWN = ("_modules", "_parameters", "_buffers", "_diffusers_hook", "forward")
"""Attributes of a module that are looked at on their own."""
DEPTH = 3
"""Of objects in attributes of objects."""
MOST = 65536
"""Numbers of a tensor that are compared by value."""


class Same:
    """Equal to another of the same object only, as long as that is there."""

    __slots__ = ("_id", "_reference")

    def __init__(self, found: object) -> None:
        self._id, self._reference = id(found), weakref.ref(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._id == other._id and self._reference() is not None

    def __hash__(self) -> int:
        return self._id


def block_form(block: nn.Module) -> tuple[Any, ...]:
    """Return the class of each module in a block, the forms of its weights, and all numbers, texts and functions."""
    return tuple((path, type(module), *_module_facts(module)) for path, module in named_modules_of(block))


def _module_facts(module: nn.Module) -> tuple[Any, ...]:
    weights = [*module._parameters.items(), *module._buffers.items()]
    forms = tuple((name, None if x is None else (tuple(x.shape), x.stride(), x.dtype)) for name, x in weights)
    return forms, tuple((name, _facts(value, DEPTH)) for name, value in vars(module).items() if name not in OWN)


def hooks_form(block: nn.Module) -> tuple[Any, ...]:
    """Return the names of diffusers' hooks on each module in a block, and which of them have a forward of their own."""
    return tuple(
        (tuple(registry._hook_order) if registry is not None else (), "forward" in attributes)
        for attributes in map(vars, modules_of(block))
        for registry in (attributes.get("_diffusers_hook"),)
    )


def attributes_of(block: nn.Module) -> list[dict[str, int]]:
    """Return which objects the attributes of all modules in a block are."""
    return [{name: id(value) for name, value in vars(module).items()} for module in modules_of(block)]


def _facts(value: Any, depth: int) -> Any:
    kind = type(value)
    if isinstance(value, PLAIN):
        return kind, value
    if isinstance(value, Tensor):
        return kind, tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (tuple, list, set, frozenset)):
        several = [_facts(each, depth) for each in value]
        return kind, tuple(several) if isinstance(value, (tuple, list)) else frozenset(several)
    if isinstance(value, Mapping):
        return kind, tuple((name, _facts(each, depth)) for name, each in value.items())
    attributes = None if isinstance(value, FUNCTIONS) or not depth else getattr(value, "__dict__", None)
    if attributes is None:
        return kind, id(value)
    return kind, tuple((name, _facts(each, depth - 1)) for name, each in attributes.items())


FUNCTIONS = (type, type(block_form), type(len))


def argument_form(
    values: Any, storages: dict[int, int], tensors: "list[weakref.ref[Tensor]]", *, by_value: bool = False
) -> Any:
    """Return the form of arguments. Tensors of any shape without values are alike by form, others one object.

    `storages`, `tensors`: those found so far, not kept alive, since a block may free what is in its lists. Which have a
    storage in common is a part of the form. `by_value`: whole numbers, such as those of tokens, are alike by value.
    Raises TypeError for arguments whose form does not say all.
    """
    kind = type(values)
    if kind is Tensor:
        tensors.append(weakref.ref(values))
        number = storages.setdefault(id(values.untyped_storage()), len(storages))
        form = tuple(values.shape), values.stride(), values.storage_offset(), values.dtype, number
        if values.is_meta:
            return form
        return (form, _numbers(values)) if by_value and _has_numbers(values) else (Same(values), values._version)
    if kind in (tuple, list):
        return kind, tuple([argument_form(each, storages, tensors, by_value=by_value) for each in values])
    if kind is dict:
        forms = [(name, argument_form(each, storages, tensors, by_value=by_value)) for name, each in values.items()]
        return tuple(forms)
    if kind in PLAIN:
        return kind, values
    raise TypeError(f"a {kind.__name__}, which may know more than can be seen, and change")


def _has_numbers(x: Tensor) -> bool:
    """Whether a tensor of any shape has whole numbers, and few enough to be compared."""
    return x.device.type == "cpu" and not x.is_floating_point() and not x.is_complex() and x.numel() <= MOST


def _numbers(x: Tensor) -> Any:
    with no_dispatch():
        return tuple(x.flatten().tolist())


def form_after(args: Any, kwargs: Any, *, by_value: bool) -> Any:
    """Return the form of arguments after a call, which may have changed their lists; None if it does not say all."""
    try:
        return argument_form((args, kwargs), {}, [], by_value=by_value)
    except TypeError:
        return None


def versions_of(tensors: "Sequence[weakref.ref[Tensor]]") -> list[int | None]:
    """Return how often each tensor, of any shape, was changed; None for one that is not there any more."""
    return [None if (x := each()) is None else x._version for each in tensors]
