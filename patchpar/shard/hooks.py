"""Hooks and replaced attributes, installed and removed without a trace.

Other libraries replace forwards too, before patchpar's hook is installed or afterwards. Theirs stay.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FunctionType, MethodType
from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from patchpar.errors import PlanError
from patchpar.shard.compiled import is_compiled

OURS = "patchpar"
MISSING = object()


class ForwardHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Replaces a module's forward by `run(module, forward, args, kwargs)`, with the forward that it had before."""

    def __init__(self, run: Callable[[nn.Module, Callable[..., Any], Any, Any], Any]) -> None:
        super().__init__()
        self._run = run

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what `run` does."""
        return self._run(module, self.fn_ref.original_forward, args, kwargs)


class InstalledHook:
    """`hook` on `module`, under `name`, until `remove`. Raises PlanError if the module has one of that name."""

    def __init__(self, module: nn.Module, hook: ModelHook, name: str) -> None:
        self.module, self.hook, self.name = module, hook, name
        self._put_in()

    def _put_in(self) -> None:
        module = self.module
        self._before, self._fresh = vars(module).get("forward", MISSING), "_diffusers_hook" not in vars(module)
        registry = HookRegistry.check_if_exists_or_initialize(module)
        if registry.get_hook(self.name) is not None:
            raise PlanError(
                f"another ParallelPipeline of this process has its plan in this {type(module).__name__}, which both "
                "have: call its restore() before, or give this one a copy that was made before both"
            )
        registry.register_hook(self.hook, self.name)
        self._wrapper, self._chained = vars(module)["forward"], registry._fn_refs[-1].forward

    @property
    def is_reached(self) -> bool:
        """Whether a call of the module runs the hook first, or hooks of diffusers that were installed after it."""
        return not self._is_passed_over and not self._has_other_in_front

    @property
    def _has_other_in_front(self) -> bool:
        last = self._registry._hook_order[-1]
        return last == self.name and vars(self.module).get("forward") is not self._wrapper

    @property
    def _is_passed_over(self) -> bool:
        """Whether a hook that was installed before it has been removed: diffusers then calls what was beneath that."""
        return self._reference.forward is not self._chained

    @property
    def _reference(self) -> Any:
        return self._registry._fn_refs[self._registry._hook_order.index(self.name)]

    def reinstall(self) -> None:
        """Reinstall the hook in front of a forward that another library has put in front of it."""
        self.remove()
        self._put_in()

    @property
    def _registry(self) -> Any:
        return self.module._diffusers_hook

    def remove(self) -> None:
        """Remove the hook. A forward that another library has put in front of it stays."""
        registry, is_behind, passed_over = self._registry, self._has_other_in_front, self._is_passed_over
        index = registry._hook_order.index(self.name)
        now, reference = vars(self.module).get("forward"), registry._fn_refs[index]
        later = registry._fn_refs[index + 1] if index + 1 < len(registry._fn_refs) else None
        later_forward = None if later is None else later.forward
        beneath = reference.forward if passed_over else reference.original_forward or reference.forward
        registry.remove_hook(self.name, recurse=False)
        reference.forward = beneath  # references to the hooked forward call the one beneath
        if later is not None and later.original_forward is not None:  # that hook calls it directly
            later.original_forward, later.forward = beneath, later_forward
        if self._fresh and not registry.hooks:
            del self.module._diffusers_hook
        if is_behind:
            vars(self.module)["forward"] = now
        elif not registry.hooks:
            _put_back(self.module, "forward", _unless_of_class(beneath, self.module) if passed_over else self._before)
        elif passed_over and later is None:
            vars(self.module)["forward"] = beneath


def _unless_of_class(forward: Any, module: nn.Module) -> Any:
    """Return a forward as a module's own attribute; MISSING for that of its class."""
    return MISSING if getattr(forward, "__func__", None) is type(module).forward else forward


class HookSet(ExitStack):
    """Hooks and replaced attributes until `close`, or the end of a `with` statement. The last is removed first.

    Afterwards modules and objects are as before. `close` is idempotent.
    """

    def before(self, module: nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False) -> None:
        """Register a torch hook before the module's forward."""
        self.callback(module.register_forward_pre_hook(hook, with_kwargs=with_kwargs).remove)

    def after(
        self, module: nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False, prepend: bool = False
    ) -> None:
        """Register a torch hook after the module's forward, with `prepend` before all registered ones."""
        self.callback(module.register_forward_hook(hook, with_kwargs=with_kwargs, prepend=prepend).remove)

    def around(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call functions before and after the module runs; of a compiled one before and after its graph."""
        if is_compiled(module):
            self.replace(module, "_compiled_call_impl", AroundGraph(module, before, after))
        else:
            self.before(module, before)
            self.after(module, after)

    def install(self, module: nn.Module, hook: ModelHook, name: str) -> InstalledHook:
        """Install a diffusers hook under `name`."""
        installed = InstalledHook(module, hook, name)
        self.callback(installed.remove)
        return installed

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set an attribute in an object's own dict, or a class's, whatever its class defines under that name."""
        self.callback(_put_back, owner, name, vars(owner).get(name, MISSING))
        _put_back(owner, name, value)


class AroundGraph:
    """The graph of a compiled module, with functions that run before and after it and are not traced."""

    def __init__(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._before, self._after = before, after
        self._eager: Any = module._call_impl
        self._graph: Any = module._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        found = self._graph(*args, **kwargs)
        self._after()
        return found

    def uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module without its graph."""
        self._before()
        found = self._eager(*args, **kwargs)
        self._after()
        return found


def _put_back(owner: object, name: str, before: object) -> None:
    """Restore an object's own attribute, or delete it where there was none."""
    if isinstance(owner, type):  # whose dict can be read only
        delattr(owner, name) if before is MISSING else setattr(owner, name, before)
    elif before is MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = before


def written_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return what replaces a module's own forward, beneath hooks of diffusers; None if nothing does."""
    forward = vars(module).get("forward")
    registry: Any = vars(module).get("_diffusers_hook")
    if forward is None or is_ours(forward):
        return None
    if registry is None or not registry.hooks:
        return None if _is_class_own(module, forward) else forward
    if not is_of_registry(forward):
        return forward  # in front of the hooks
    first = registry._fn_refs[0]
    forward = first.original_forward or first.forward
    return None if _is_class_own(module, forward) else forward


def is_of_registry(forward: Any) -> bool:
    """Whether a forward is the one that diffusers installs to run its hooks."""
    inner = forward.func if isinstance(forward, functools.partial) else None
    return getattr(inner, "__qualname__", "").startswith("HookRegistry.register_hook")


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and hook of every diffusers hook on a module but patchpar's, in the order of installation."""
    registry: Any = vars(module).get("_diffusers_hook")
    for name in registry._hook_order if registry is not None else ():
        if package_of(type(registry.hooks[name]).__module__) != OURS:
            yield name, registry.hooks[name]


def _is_class_own(module: nn.Module, forward: Any) -> bool:
    return getattr(forward, "__func__", None) is getattr(type(module), "forward", None)


def is_ours(value: Any) -> bool:
    """Whether a function is one of patchpar's, whatever wraps it."""
    while isinstance(value, (functools.partial, MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return isinstance(value, FunctionType) and package_of(value.__globals__.get("__name__", "")) == OURS


def package_of(module: str) -> str:
    """Return the top-level package of a module name."""
    return module.partition(".")[0]
