"""What foreign code of a network keeps from one call to the next: saved, put back, and compared.

Reached from replaced forwards, hooks, processors, and attributes that were set on modules: closures, globals of the
code's own modules, attributes of objects and classes, lists, dicts, sets, iterators, and the states of random number
generators. Tensors are kept by reference.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.launch import accelerators
from patchpar.shard.foreign.holders import Entries, Holder, holders_of, roots_of

Path = tuple[Any, ...]


class SavedState:
    """The state as it was when this was made. `tensors`: those of any shape that are part of it, by where they are."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._device = device
        self._saved: list[tuple[Holder, Entries]] = []
        self._copies: list[tuple[Any, Any]] = []  # what changes without being replaced, each with its copy
        self.tensors: dict[Path, Tensor] = {}
        self._random = _random_states(device)
        seen: dict[int, Any] = {}
        pending: list[tuple[Path, Any]] = list(roots_of(network))
        while pending:
            path, value = pending.pop()
            pending += self._visit(path, value, seen)
        self._versions = {id(x): 0 if x.is_inference() else x._version for x in self.tensors.values()}

    def _visit(self, path: Path, value: Any, seen: dict[int, Any]) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, Tensor):
            self.tensors[path] = value
            return
        if isinstance(value, tuple):
            yield from (((*path, number), each) for number, each in enumerate(value))
            return
        if id(value) in seen:
            return
        seen[id(value)] = value
        self._copy(value)
        for name, holder in holders_of(value):
            entries = holder.read()
            self._saved.append((holder, entries))
            for key, each in entries.items():
                yield (*path, name, key), each

    def _copy(self, value: Any) -> None:
        """Keep a copy of what changes without being replaced, such as an iterator."""
        if isinstance(value, GeneratorType):
            raise UnsupportedModel(
                f"code of another library or your own keeps a generator ({value.__qualname__}) from one call of the "
                "network to the next, which cannot be put back after the calls that verify a plan: keep a number or "
                "a list instead, use verify=False, or use one device"
            )
        if isinstance(value, type):
            return
        if isinstance(value, torch.Generator):
            self._copies.append((value, value.get_state()))
        elif hasattr(value, "__next__") and not isinstance(value, nn.Module):
            self._copies.append((value, _copied(value, copy.copy)))
        elif isinstance(value, (bytearray, random.Random)) or type(value).__module__.startswith("numpy"):
            self._copies.append((value, _copied(value, copy.deepcopy)))

    def put_back(self, twins: Mapping[int, Tensor] | None = None) -> None:
        """Make the state what it was. `twins`: tensors, of any shape, that take the place of others, by their id."""
        others: dict[int, Any] = {**(twins or {})}
        for value, kept in self._copies:
            if isinstance(value, torch.Generator):
                value.set_state(kept)
            else:  # one for all places that have it
                others[id(value)] = _copied(kept, copy.copy if hasattr(value, "__next__") else copy.deepcopy)
        for holder, entries in self._saved:
            wanted = {key: _replaced(value, others) for key, value in entries.items()}
            if not _are_same(holder.read(), wanted):
                holder.write(wanted)
        for state in self._random:
            state.write(state.value)

    @property
    def has_written_tensors(self) -> bool:
        """Whether any of the tensors has been written to since."""
        return any(not x.is_inference() and x._version != self._versions[id(x)] for x in self.tensors.values())

    @property
    def has_changed(self) -> bool:
        """Whether any of it is another value now: also where a tensor was written to, or random numbers were taken."""
        return (
            self.has_written_tensors
            or any(not _are_same(holder.read(), entries) for holder, entries in self._saved)
            or not all(_is_as_copied(value, kept) for value, kept in self._copies)
            or any(not _is_equal_state(state.read(), state.value) for state in self._random)
        )


def _copied(value: Any, copier: Any) -> Any:
    """Return a copy, or the value itself where there is none."""
    try:
        return copier(value)
    except TypeError:
        return value


def _are_same(now: Entries, wanted: Entries) -> bool:
    return len(now) == len(wanted) and all(
        key in now and (now[key] is value or _is_equal_number(now[key], value)) for key, value in wanted.items()
    )


def _is_equal_number(one: Any, other: Any) -> bool:
    """Whether both are the same number or text, or tuples of such."""
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_is_equal_number, one, other))
    return type(one) is type(other) and isinstance(one, (int, float, str, bytes, torch.Size)) and one == other


def _replaced(value: Any, others: Mapping[int, Any]) -> Any:
    """Return what takes the place of a value by its id, also of those in tuples; else the value."""
    if isinstance(value, tuple) and others and type(value) is not torch.Size:
        items = [_replaced(each, others) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return others.get(id(value), value)


class _RandomState(NamedTuple):
    """The state of a generator, as it was, and what reads and sets it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    value: Any


def _random_states(device: torch.device) -> list[_RandomState]:
    """Return the states of the generators that code may take numbers from."""
    pairs: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
    ]
    if accelerators.random_state(device) is not None:
        pairs.append(
            (partial(accelerators.random_state, device), lambda state: accelerators.set_random_state(state, device))
        )
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        pairs.append((numpy.random.get_state, numpy.random.set_state))
    return [_RandomState(read, write, read()) for read, write in pairs]


def _is_equal_state(now: Any, then: Any) -> bool:
    """Whether two states of a generator, which may hold tensors and arrays, are equal."""
    if isinstance(now, tuple) and isinstance(then, tuple):
        return len(now) == len(then) and all(map(_is_equal_state, now, then))
    if isinstance(now, Tensor):
        return torch.equal(now, then)
    return bool(now.tobytes() == then.tobytes()) if hasattr(now, "tobytes") else bool(now == then)


def _is_as_copied(value: Any, kept: Any) -> bool:
    """Whether what changes without being replaced is as its copy. What cannot be compared counts as changed."""
    if isinstance(value, torch.Generator):
        return torch.equal(value.get_state(), kept)
    if isinstance(value, random.Random):
        return value.getstate() == kept.getstate()
    return _is_equal_state(value, kept)
