"""Copies of what is built again and again: a tenth to a fifth of the time that it takes to build it.

What is built a third time is written down then, and read from then on: the modules by pickle, the memory of their
tensors apart from it. A copy shares nothing with another one, so that tests may change it; tensors that shared memory
share it in a copy too. What pickle cannot write (functions within functions) is built every time.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BUILDS = 3
"""How often the same is built before it is copied: to write it down takes half as long as to build it."""
_CANNOT = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises for what it cannot write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A tensor: which of the storages it is in, and where."""

    storage: int
    is_parameter: bool
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    attributes: dict[str, Any]

    def tensor(self, storages: list[Any]) -> Tensor:
        with torch.no_grad():
            found = torch.empty(0, dtype=self.dtype)
            found.set_(storages[self.storage], self.offset, self.size, self.stride)
        if self.is_parameter:
            found = nn.Parameter(found, requires_grad=False)
        vars(found).update(self.attributes)
        return found


@dataclass(frozen=True, slots=True)
class _Written:
    data: bytes
    views: list[_View]
    storages: list[Any]


class _Writer(pickle.Pickler):
    """Writes numbers in place of tensors, and keeps these."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.views: list[_View] = []
        self.storages: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._numbers_of_storages: dict[int, int] = {}
        self._seen: list[Tensor] = []  # while they are here, no other object has their id

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.views)
            self._seen.append(value)
            self.views.append(self._view(value))
        return self._numbers[id(value)]

    def _view(self, value: Tensor) -> _View:
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.device.type == "cpu"
        if not plain or value.requires_grad:
            raise pickle.PicklingError(f"a tensor of {type(value).__name__} on {value.device}")
        storage = value.untyped_storage()
        key = storage.data_ptr() or -id(value)
        if key not in self._numbers_of_storages:
            self._numbers_of_storages[key] = len(self.storages)
            self.storages.append(storage.clone())
        return _View(
            storage=self._numbers_of_storages[key],
            is_parameter=isinstance(value, nn.Parameter),
            dtype=value.dtype,
            offset=value.storage_offset(),
            size=value.size(),
            stride=value.stride(),
            attributes=dict(vars(value)),
        )


class _Reader(pickle.Unpickler):
    """Reads what a writer wrote, with memory of its own."""

    def __init__(self, written: _Written) -> None:
        super().__init__(io.BytesIO(written.data))
        self._views = written.views
        self._storages = [each.clone() for each in written.storages]
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, number: int) -> Tensor:
        if number not in self._tensors:
            self._tensors[number] = self._views[number].tensor(self._storages)
        return self._tensors[number]


def _written(value: Any) -> _Written | None:
    """None for what pickle cannot write."""
    file = io.BytesIO()
    writer = _Writer(file)
    try:
        writer.dump(value)
    except _CANNOT:
        return None
    return _Written(file.getvalue(), writer.views, writer.storages)


@dataclass(slots=True)
class Copies:
    """What each of some functions makes, by name."""

    _written: dict[str, _Written | None] = field(default_factory=dict)
    _built: Counter[str] = field(default_factory=Counter)

    def of(self, name: str, build: Callable[[], Any]) -> Any:
        """What `build` returns, or a copy of what it returned before under this name."""
        found = self._written.get(name)
        if found is not None:
            return _Reader(found).load()
        made = build()
        self._built[name] += 1
        if self._built[name] == BUILDS:
            self._written[name] = _written(made)
        return made

    def has(self, name: str) -> bool:
        """Whether the next one of this name is a copy."""
        return self._written.get(name) is not None
