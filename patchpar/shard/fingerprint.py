"""Fingerprint of what a network computes beside its weights. A verification result holds for one fingerprint.

    attributes    numbers, texts, functions, and small objects such as attention processors; the configuration
    code          of classes, of replaced forwards, and of the functions that forwards and processors call
    hooks         of torch and of diffusers, except patchpar's
    torch         replaced functions of torch.nn.functional and torch.fft

So anything that works on the whole image inside a network is detected: FreeU, a patched forward, a hook of another
library, a processor. Code from outside the libraries that patchpar depends on is `foreign`.
"""

import functools
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from patchpar.shard.hooks import OURS, hooks_of, is_ours, package_of, written_forward
from patchpar.shard.module_tree import named_modules_of
from patchpar.shard.sdpa import beneath

KNOWN = frozenset(
    {
        "torch",
        "diffusers",
        "transformers",
        "huggingface_hub",
        "peft",
        "accelerate",
        "builtins",
        "functools",
        "typing_extensions",
        OURS,
    }
)
TORCH_MODULES: tuple[ModuleType, ...] = (torch.nn.functional, torch.fft)
TORCHS_OWN = frozenset({"torch", "typing", "builtins", "functools", "collections", "contextlib", "warnings"})
HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks")
GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
FACTORS = frozenset({"scale", "scaling", "lora_scale"})  # of an adapter's output: only whether it is zero matters
COMPILED = "_compiled_call_impl"
SKIPPED = frozenset(
    {
        *vars(nn.Module()),
        *("forward", "_diffusers_hook", "_internal_dict", "_gradient_checkpointing_func"),
        "peft_config",
    }
)
CALLED = ("forward", "__call__")
CODE = (FunctionType, BuiltinFunctionType, MethodType, functools.partial, type)
SCALARS = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 3  # of nested values

Facts = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Facts by module path, class or "torch"; `origins`: descriptions of code from no known library, with its name."""

    facts: Mapping[str, Facts]
    origins: Mapping[str, str]

    @property
    def foreign(self) -> tuple[str, ...]:
        """Descriptions of code from no known library."""
        return tuple(self.origins)

    @property
    def digest(self) -> str:
        """Short hash, the same in every process."""
        return hashlib.sha256(repr(sorted(self.facts.items())).encode()).hexdigest()[:16]

    def differences(self, other: "Fingerprint") -> frozenset[tuple[str, str]]:
        """Return (path, name) of the facts that differ."""
        paths = [path for path in {*self.facts, *other.facts} if self.facts.get(path) != other.facts.get(path)]
        return frozenset((path, name) for path in paths for name in _unlike(self._of(path), other._of(path)))

    def _of(self, path: str) -> dict[str, Any]:
        return dict(self.facts.get(path, ()))


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    missing = object()
    for name in {*one, *other}:
        if one.get(name, missing) != other.get(name, missing):
            yield name


def fingerprint(network: nn.Module) -> Fingerprint:
    """Return the current fingerprint of a network, in some milliseconds for a large one; nothing runs on a GPU."""
    return _Reader().read(network)


class _Reader:
    """Reads the facts of one network and notes foreign code."""

    def __init__(self) -> None:
        self._foreign: dict[str, str] = {}
        self._where = ""
        self._called: dict[type, tuple[Any, ...]] = {}  # what objects of a class call
        self._open = set[int]()  # ids of functions that are read now: one may hold itself

    def read(self, network: nn.Module) -> Fingerprint:
        modules = dict(named_modules_of(network))
        facts = {path: self._of_module(path, module) for path, module in modules.items()}
        for kind in dict.fromkeys(type(module) for module in modules.values()):
            facts[f"class {_name_of(kind)}"] = self._of_class(kind)
        facts["torch"] = self._of_torch()
        return Fingerprint(facts, self._foreign)

    # --- modules, classes, torch ------------------------------------------------------------------------------------

    def _of_module(self, path: str, module: nn.Module) -> Facts:
        self._where = path or "the network"
        attributes = vars(module)
        found: list[tuple[str, Any]] = [("class", _name_of(type(module)))]
        if attributes.get(COMPILED) is not None:
            found.append((COMPILED, True))
        forward = written_forward(module)
        if forward is not None:
            found.append(("forward", self._code(forward)))
        for name in HOOK_DICTS:
            if hooks := self._codes(attributes[name].values()):
                found.append((name, hooks))
        for name, hook in hooks_of(module):
            found.append((f"hook {name}", (_name_of(type(hook)), self._of_object(hook, depth=0))))
        for name, value in {**attributes, "configuration": _configuration(attributes)}.items():
            if value is not None and name not in SKIPPED and not is_ours(value):  # None: what was there is unloaded
                found.append((name, _is_at_work(value) if name in FACTORS else self._value(value, DEPTH)))
        return tuple(found)

    def _of_class(self, kind: type) -> Facts:
        self._where = _name_of(kind)
        if package_of(kind.__module__) not in KNOWN:
            self._foreign[f"the class {self._where}"] = self._where
        found: list[tuple[str, Any]] = []
        for name in CALLED:
            function = getattr(kind, name, None)
            if isinstance(function, FunctionType) and function is not nn.Module.__call__:
                found.append((name, self._code(function)))
                found.append((f"{name} calls", self._codes(_called(kind, function))))
        return tuple(found)

    def _of_torch(self) -> Facts:
        self._where = "torch"
        found = [(name, self._code(function)) for name, function in replaced_functions()]
        return (*found, *((name, self._codes(getattr(torch_modules, name).values())) for name in GLOBAL_HOOKS))

    # --- values and code --------------------------------------------------------------------------------------------

    def _value(self, value: Any, depth: int) -> Any:
        """Return a comparable form of a value whose repr is the same in every process."""
        if isinstance(value, SCALARS):
            return value
        if isinstance(value, (Tensor, torch.dtype, torch.device)):
            return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)
        if isinstance(value, CODE):
            return self._code(value)
        if depth == 0 or isinstance(value, nn.Module):
            return _name_of(type(value))
        return self._of_many(value, depth - 1)

    def _of_many(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return tuple((str(key), self._value(each, depth)) for key, each in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(self._value(each, depth) for each in value)
        if isinstance(value, (set, frozenset)):
            return tuple(sorted(repr(self._value(each, depth)) for each in value))
        return self._of_object(value, depth)

    def _of_object(self, value: Any, depth: int) -> Any:
        """Return class, attributes, and code of `__call__` and what it calls, of an object such as a processor."""
        kind = type(value)
        if package_of(kind.__module__) not in KNOWN:
            self._foreign[f"a {_name_of(kind)} in {self._where}"] = _name_of(kind)
        functions = [vars(base)["__call__"] for base in kind.__mro__ if _calls(base)]
        called = [self._code(each) for each in functions]
        if kind not in self._called:  # once for all attention layers
            self._called[kind] = tuple(self._codes(_called(kind, each)) for each in functions)
        attributes = {name: each for name, each in getattr(value, "__dict__", {}).items() if name != "fn_ref"}
        read = (_is_at_work(each) if n in FACTORS else self._value(each, depth) for n, each in attributes.items())
        return _name_of(kind), tuple(called), self._called[kind], tuple(zip(attributes, read, strict=True))

    def _codes(self, functions: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(self._code(function) for function in functions if not is_ours(function))

    def _code(self, function: Any) -> Any:
        """Return name and code of a function, and what it holds: its closure, and defaults of its parameters."""
        if isinstance(function, MethodType):
            return self._code(function.__func__)
        if isinstance(function, functools.partial):
            return "partial", self._code(function.func), self._value((function.args, function.keywords), 2)
        if not isinstance(function, FunctionType):
            named = function if hasattr(function, "__qualname__") else type(function)
            self._note(named.__qualname__, getattr(named, "__module__", None) or "")
            return _name_of(named)
        self._note(function.__qualname__, function.__globals__.get("__name__", ""))
        name, number = (function.__module__, function.__qualname__), id(function)
        if number in self._open:
            return name
        self._open.add(number)
        held = tuple(self._value(each, 0) for each in _held_by(function))
        self._open.remove(number)
        return *name, _digest(function.__code__), held

    def _note(self, name: str, module: str) -> None:
        if module and package_of(module) not in KNOWN:
            self._foreign[f"{name} of {module} in {self._where}"] = f"{module}.{name}"


def replaced_functions() -> Iterator[tuple[str, Any]]:
    """Yield the functions of torch.nn.functional and torch.fft that another library has replaced, with their names."""
    for module in TORCH_MODULES:
        for name, value in vars(module).items():
            if _replaces_torchs(function := beneath(value)):
                yield f"{module.__name__}.{name}", function


def _replaces_torchs(value: Any) -> bool:
    if isinstance(value, (BuiltinFunctionType, type, ModuleType)) or not callable(value):
        return False
    module = value.__globals__.get("__name__", "") if isinstance(value, FunctionType) else type(value).__module__
    return package_of(module) not in TORCHS_OWN


def _called(kind: type, function: FunctionType) -> Iterator[FunctionType]:
    """Yield the methods of its class and functions of its module that a function names."""
    for name in function.__code__.co_names:
        for found in (function.__globals__.get(name), getattr(kind, name, None)):
            if isinstance(found, FunctionType):
                yield found


def _calls(kind: type) -> bool:
    return isinstance(vars(kind).get("__call__"), FunctionType)


def _configuration(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of a network of diffusers: some forwards decide by it, and pipelines write to it."""
    return {k: v for k, v in attributes.get("_internal_dict", {}).items() if not k.startswith("_")} or None


def _is_at_work(value: Any) -> Any:
    """Whether a factor, or each of several, is not zero."""
    if isinstance(value, Mapping):
        return tuple((str(key), _is_at_work(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_is_at_work(each) for each in value)
    return value != 0 if isinstance(value, (int, float)) else type(value).__name__


def _held_by(function: FunctionType) -> Iterator[Any]:
    """Yield the values in the closure of a function, and the defaults of its parameters."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where the cell is empty
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=16384)
def _digest(code: CodeType) -> int:
    """Return a checksum of what a function does, whatever its file and lines."""
    value = zlib.crc32(repr((code.co_names, code.co_varnames)).encode(), zlib.crc32(code.co_code))
    for each in code.co_consts:
        if isinstance(each, CodeType):
            value = zlib.crc32(_digest(each).to_bytes(4, "big"), value)
        elif isinstance(each, SCALARS):
            value = zlib.crc32(repr(each).encode(), value)
    return value


def _name_of(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"
