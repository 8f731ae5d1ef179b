"""A hook of ours on a module, put in and taken out again so that nothing of it is left, and nothing of others is lost.

Others replace forwards too: before ours came in, or while it is there. What they have put there stays.
"""

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

OURS = "patchpar"
MISSING = object()


class InstalledHook:
    """`hook` on `module`, under `name`, until `take_out`."""

    def __init__(self, module: nn.Module, hook: ModelHook, name: str) -> None:
        self.module, self.hook, self.name = module, hook, name
        self._before, self._fresh = vars(module).get("forward", MISSING), "_diffusers_hook" not in vars(module)
        registry = HookRegistry.check_if_exists_or_initialize(module)
        registry.register_hook(hook, name)
        self._wrapper = vars(module)["forward"]

    @property
    def is_reached(self) -> bool:
        """Whether a call of the module comes through the hook first, or through hooks that stand before it."""
        last = self._registry._hook_order[-1]
        return last != self.name or vars(self.module).get("forward") is self._wrapper

    @property
    def _registry(self) -> Any:
        return self.module._diffusers_hook

    def take_out(self) -> None:
        """The module runs without the hook. A forward that somebody has put before it meanwhile stays."""
        registry, reached = self._registry, self.is_reached
        place = registry._hook_order.index(self.name)
        now, reference = vars(self.module).get("forward"), registry._fn_refs[place]
        later = registry._fn_refs[place + 1] if place + 1 < len(registry._fn_refs) else None
        way = None if later is None else later.forward
        beneath = reference.original_forward or reference.forward
        registry.remove_hook(self.name, recurse=False)
        reference.forward = beneath  # whoever has kept the forward with our hook in it calls what is beneath
        if later is not None and later.original_forward is not None:  # that hook calls it itself
            later.original_forward, later.forward = beneath, way
        if self._fresh and not registry.hooks:
            del self.module._diffusers_hook
        if not reached:
            vars(self.module)["forward"] = now
        elif not registry.hooks:
            self._give_back()

    def _give_back(self) -> None:
        """What the module had of its own, or nothing."""
        if self._before is MISSING:
            vars(self.module).pop("forward", None)
        else:
            vars(self.module)["forward"] = self._before


def written_forward(module: nn.Module) -> Callable[..., Any] | None:
    """What somebody has put in the place of a module's own forward, beneath hooks of diffusers; None if nobody has."""
    forward = vars(module).get("forward")
    registry: Any = vars(module).get("_diffusers_hook")
    if forward is None or is_ours(forward):
        return None
    if registry is None or not registry.hooks:
        return None if _is_class_own(module, forward) else forward
    if not is_of_registry(forward):
        return forward  # it stands before the hooks
    first = registry._fn_refs[0]
    forward = first.original_forward or first.forward
    return None if _is_class_own(module, forward) else forward


def is_of_registry(forward: Any) -> bool:
    """Whether a forward is what diffusers puts before its hooks."""
    inner = forward.func if isinstance(forward, functools.partial) else None
    return getattr(inner, "__qualname__", "").startswith("HookRegistry.register_hook")


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and hook of every diffusers hook on a module that is not ours, in the order in which they were put in."""
    registry: Any = vars(module).get("_diffusers_hook")
    for name in registry._hook_order if registry is not None else ():
        if package_of(type(registry.hooks[name]).__module__) != OURS:
            yield name, registry.hooks[name]


def _is_class_own(module: nn.Module, forward: Any) -> bool:
    return getattr(forward, "__func__", None) is getattr(type(module), "forward", None)


def is_ours(value: Any) -> bool:
    """Whether a function is one of patchpar's, whatever name it wears."""
    while isinstance(value, (functools.partial, MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return isinstance(value, FunctionType) and package_of(value.__globals__.get("__name__", "")) == OURS


def package_of(module: str) -> str:
    """The package that a module belongs to."""
    return module.partition(".")[0]
