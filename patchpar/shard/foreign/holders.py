"""Where Python keeps values that foreign code may change: cells of closures, globals, objects, classes, containers."""

import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as hooked

from patchpar.shard.fingerprint import CALLED, COMPILED, GLOBAL_HOOKS, HOOK_DICTS, KNOWN, SKIPPED, replaced_functions
from patchpar.shard.hooks import hooks_of, is_ours, package_of, written_forward

Entries = dict[Any, Any]
DICTS = (dict, OrderedDict, defaultdict)
CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, property, staticmethod, classmethod)


class Holder(NamedTuple):
    """A place with values by key: read them, or make them what they were."""

    read: Callable[[], Entries]
    write: Callable[[Entries], None]


def is_foreign(module: str) -> bool:
    """Whether a module of that name belongs neither to Python nor to a library that patchpar depends on."""
    package = package_of(module)
    return bool(package) and package not in KNOWN and package not in sys.stdlib_module_names


def roots_of(network: nn.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what may hold foreign code in a network, each with a name."""
    classes = dict.fromkeys(type(module) for module in network.modules())
    for path, module in network.named_modules():
        yield (path, "module"), module
        yield (path, "forward"), written_forward(module)
        for name in HOOK_DICTS:
            yield (path, name), tuple(vars(module)[name].values())
        yield (path, "hooks"), tuple(hook for _, hook in hooks_of(module))
    for kind in classes:
        yield (kind.__qualname__, "class"), tuple(getattr(kind, name, None) for name in CALLED)
        yield (kind.__qualname__, "code"), _code_of(kind)
    yield ("torch",), tuple(function for _, function in replaced_functions())
    yield ("torch hooks",), tuple(each for name in GLOBAL_HOOKS for each in getattr(hooked, name).values())


def holders_of(value: Any) -> Iterator[tuple[str, Holder]]:
    """Yield the places of what a value keeps, each with a name. None for constants, and for objects of libraries."""
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield "method", _constant({"self": value.__self__, "function": value.__func__})
    elif isinstance(value, functools.partial):
        yield "partial", _constant({"function": value.func, "args": value.args, "kwargs": value.keywords})
    elif isinstance(value, nn.Module):
        yield "module", _of_mapping(vars(value), _is_set_on_module)
    elif isinstance(value, (type, ModuleType)):
        if is_foreign(value.__module__ if isinstance(value, type) else value.__name__):
            yield "names", _of_class(value) if isinstance(value, type) else _of_mapping(vars(value), _is_variable)
    else:
        yield from _of_container(value)


def _code_of(kind: type) -> tuple[Any, ...]:
    """Return the foreign classes among a class and its bases, with their functions."""
    kinds = [each for each in kind.__mro__ if is_foreign(each.__module__)]
    return tuple(each for own in kinds for each in (own, *vars(own).values()) if isinstance(each, (type, FunctionType)))


def _of_container(value: Any) -> Iterator[tuple[str, Holder]]:
    if type(value) in DICTS:
        yield "dict", _of_mapping(value)
    elif type(value) in (list, deque):
        yield "list", _of_list(value)
    elif type(value) is set:
        yield "set", Holder(lambda: {each: None for each in value}, lambda entries: _fill_set(value, entries))
    elif is_foreign(type(value).__module__) and package_of(type(value).__module__) != "numpy":  # which is copied
        if isinstance(value, (dict, list, deque)):
            yield "items", _of_mapping(value) if isinstance(value, dict) else _of_list(value)
        yield "code", _constant(dict(enumerate(_code_of(type(value)))))
        if hasattr(value, "__dict__"):
            yield "object", _of_mapping(vars(value))
        kinds = [vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)]
        slots = [name for kind in kinds for name, each in kind.items() if isinstance(each, MemberDescriptorType)]
        if slots:
            yield "slots", _of_attributes(value, slots)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Holder]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"cell {name}", _of_cell(cell)
    if not is_foreign(function.__globals__.get("__name__", "")):
        return
    yield "attributes", _of_mapping(vars(function))
    yield "defaults", _constant({"args": function.__defaults__, "kwargs": function.__kwdefaults__})
    names = set(_names_in(function.__code__))
    yield "globals", _of_mapping(function.__globals__, lambda name, each: name in names)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


def _of_cell(cell: Any) -> Holder:
    def read() -> Entries:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # it is empty
            return {}

    def write(entries: Entries) -> None:
        if entries:
            cell.cell_contents = entries[""]
        else:
            del cell.cell_contents

    return Holder(read, write)


def _constant(entries: Entries) -> Holder:
    return Holder(lambda: dict(entries), lambda _: None)


def _of_mapping(mapping: Any, wanted: Callable[[Any, Any], bool] = lambda name, value: True) -> Holder:
    def read() -> Entries:
        return {name: value for name, value in list(mapping.items()) if wanted(name, value)}

    def write(entries: Entries) -> None:
        for name in read().keys() - entries.keys():
            del mapping[name]
        for name, value in entries.items():
            mapping[name] = value

    return Holder(read, write)


def _of_list(items: Any) -> Holder:
    def write(entries: Entries) -> None:
        items.clear()
        items.extend(entries.values())

    return Holder(lambda: dict(enumerate(items)), write)


def _fill_set(items: set[Any], entries: Entries) -> None:
    items.clear()
    items.update(entries)


def _of_attributes(value: Any, names: list[str]) -> Holder:
    def write(entries: Entries) -> None:
        for name in names:
            if name in entries:
                object.__setattr__(value, name, entries[name])
            elif hasattr(value, name):
                object.__delattr__(value, name)

    return Holder(lambda: {name: getattr(value, name) for name in names if hasattr(value, name)}, write)


def _of_class(kind: type) -> Holder:
    def read() -> Entries:
        return {name: value for name, value in vars(kind).items() if _is_variable(name, value)}

    def write(entries: Entries) -> None:
        for name in read().keys() - entries.keys():
            delattr(kind, name)
        for name, value in entries.items():
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)

    return Holder(read, write)


def _is_set_on_module(name: str, value: Any) -> bool:
    return name not in SKIPPED and name != COMPILED and not is_ours(value)


def _is_variable(name: str, value: Any) -> bool:
    """Whether a name of a class or of a module may be a value that changes, rather than code."""
    return not isinstance(value, CODE) and not (name.startswith("__") and name.endswith("__"))
