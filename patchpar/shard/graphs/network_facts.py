"""What is compared of a network before every call: forwards, hooks, processors, modes, adapters, and what is set.

Guiders, and pipelines that are no part of diffusers, change these between two calls of one step, where nothing else
tells that the network may have changed. All of the network is compared at the start of an image, which takes longer.
"""

import functools
import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from patchpar.shard.fingerprint import CODE, FACTORS
from patchpar.shard.graphs.repeated_network import baked
from patchpar.shard.graphs.static_call import PLAIN
from patchpar.shard.hooks import hooks_of, is_ours, written_forward

PROCESSOR = "processor"
MODELS = "diffusers.models."  # whose functions attention processors call
SET = (*PLAIN, list, tuple, dict)
CONFIG = "_internal_dict"
OF_ADAPTERS = FACTORS | {"_disable_adapters", "_active_adapter"}
FREEU = ("s1", "s2", "b1", "b2")
"""What `enable_freeu` sets on blocks, which have no such attributes before."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedFacts:
    """A network as a graph repeats it. `objects`: forwards that replace a module's own, hooks, attention processors.

    `evicted`: how much caches of its code have dropped, which a graph may read. `numbers`: modes, factors, what
    processors hold, and the configuration.
    """

    objects: tuple[Any, ...]
    numbers: tuple[Any, ...]
    evicted: tuple[int, ...]


class NetworkFacts:
    """The facts of one network, which are looked up in less than a millisecond for a large one."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._modules: tuple[nn.Module, ...] = ()
        self._caches: tuple[Any, ...] = ()
        self._last: tuple[Any, Any] | None = None
        self._kind: tuple[Hashable, ...] = ()
        self._objects: tuple[Any, ...] = ()
        self._factors: tuple[tuple[dict[str, Any], str], ...] = ()
        self._held: tuple[dict[str, Any], ...] = ()  # by processors

    def renew(self) -> bool:
        """Find the modules anew, where they may have been replaced; return whether they are others than before."""
        found, before = tuple(self._network.modules()), self._modules
        same = len(found) == len(before) and all(x is y for x, y in zip(found, before, strict=True))
        if same:
            return False
        self._modules, self._last = found, None
        self._attributes = [vars(module) for module in found]
        self._attending = [module for module in found if hasattr(module, PROCESSOR)]
        self._caches = tuple(_caches_of(found))
        return bool(before)

    def kind(self) -> Hashable:
        """Return what a call depends on that is equal on all ranks: which hooks and processors there are."""
        if not self._modules:
            self.renew()
        hooks = [
            (x.get("forward"), tuple(x["_forward_pre_hooks"]), tuple(x["_forward_hooks"])) for x in self._attributes
        ]  # each hook has another number
        now = hooks, [getattr(module, PROCESSOR, None) for module in self._attending]
        if now != self._last:
            self._last = now
            self._read(now[1])
        return self._kind

    def _read(self, processors: list[Any]) -> None:
        replaced = [(number, module, written_forward(module)) for number, module in enumerate(self._modules)]
        of_hooks = [(number, *_hooks_on(module)) for number, module, _ in replaced]
        forwards = [(number, forward) for number, _, forward in replaced if forward is not None]
        self._kind = (
            tuple(each for each in of_hooks if any(each[1:])),
            tuple((number, getattr(forward, "__qualname__", "")) for number, forward in forwards),
            tuple(type(each).__qualname__ for each in processors),
        )
        hooks = (
            x for module in self._modules for each in _torch_hooks(module) for x in each.values() if not is_ours(x)
        )
        self._objects = (*(forward for _, forward in forwards), *hooks, *processors)
        blocks = [vars(each) for each in getattr(self._network, "up_blocks", ())]
        self._factors = (
            *((owner, name) for owner in self._attributes for name in OF_ADAPTERS if name in owner),
            *((owner, name) for owner in blocks for name in FREEU),
        )
        objects = (each for each in processors if not isinstance(each, nn.Module))
        self._held = tuple(getattr(each, "__dict__", {}) for each in objects)

    def captured(self) -> CapturedFacts:
        """Return the facts of a step that is captured now. Its `kind` has been read."""
        return CapturedFacts(self._objects, self._numbers(), self._evicted())

    def are_as(self, captured: CapturedFacts) -> bool:
        """Whether the network is as it was for a step of the same `kind`, which has been read."""
        same = len(captured.objects) == len(self._objects) and all(map(_alike, captured.objects, self._objects))
        return same and captured.numbers == self._numbers() and captured.evicted == self._evicted()

    def _numbers(self) -> tuple[Any, ...]:
        modes = bytes(x["training"] for x in self._attributes)
        factors = tuple(_numbers_of(owner.get(name)) for owner, name in self._factors)
        held = tuple((name, _numbers_of(x)) for each in self._held for name, x in each.items() if isinstance(x, SET))
        return modes, factors, held, vars(self._network).get(CONFIG)

    def _evicted(self) -> tuple[int, ...]:
        counts = [each.cache_info() for each in self._caches]
        return tuple(each.misses - each.currsize for each in counts)


def _hooks_on(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of other libraries: names of diffusers', and how many of torch's."""
    names = tuple(name for name, _ in hooks_of(module))
    return names, *(sum(not is_ours(x) for x in hooks.values()) for hooks in _torch_hooks(module))


def _torch_hooks(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks


def _numbers_of(factor: Any) -> Any:
    """Return a factor in a form that is compared; tensors are read where they lie."""
    if isinstance(factor, PLAIN):
        return type(factor), factor
    if type(factor) is dict and all(type(x) in (float, int) for x in factor.values()):
        return tuple(factor.items())
    return baked(factor)


def _alike(one: Any, other: Any) -> bool:
    """Whether two forwards or processors do the same: one object, or objects of one class with the same attributes."""
    if isinstance(one, (nn.Module, *CODE)) or not hasattr(one, "__dict__"):
        return bool(one == other)
    return one is other or (type(one) is type(other) and _values(one) == _values(other))


def _values(each: Any) -> dict[str, Any]:
    return {name: (type(x), repr(x)) if isinstance(x, PLAIN) else id(x) for name, x in vars(each).items()}


def _caches_of(modules: tuple[nn.Module, ...]) -> Iterator[Any]:
    """Yield the caches of bounded size in the code of modules, such as of rotary embeddings for each size."""
    kinds = dict.fromkeys(type(module) for module in modules)
    scopes: list[Mapping[str, Any]] = [vars(base) for kind in kinds for base in kind.__mro__]
    own = {kind.__module__ for kind in kinds}
    scopes += [vars(each) for name, each in sys.modules.copy().items() if name in own or name.startswith(MODELS)]
    found: dict[int, Any] = {}
    for scope in scopes:
        for value in tuple(scope.values()):
            for each in (value, *_closed_over(value)):
                if isinstance(each, functools._lru_cache_wrapper) and each.cache_parameters()["maxsize"]:
                    found[id(each)] = each
    yield from found.values()


def _closed_over(value: Any) -> Iterator[Any]:
    """Yield what a function of a module holds, such as the cache around which diffusers puts another function."""
    for cell in getattr(value, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            continue
