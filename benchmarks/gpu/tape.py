"""Whether a step could be replayed as a CUDA graph: two tapes of its operators, and where they differ.

A graph repeats the same operators on the same addresses, and the process takes no part in it. So of two steps

    operators     are the same, in order, with the same shapes and numbers; messages too
    reads         there are none: the process waits for no value of the device
    buffers       what a step takes from the step before lies where it lay in that step, or in turns in one of two

Storages are told apart by number and not by address, since a freed address may be given out again by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.recorder import LiveMemory, Recorder, location


class Entry(NamedTuple):
    """One operator: its name with shapes and numbers, the storages from before the step that it takes, its place."""

    text: str
    before: tuple[int, ...]
    where: str


class StorageNumbers:
    """A number for every storage, never given twice."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._next = 0

    def of(self, x: Tensor) -> int:
        """Return the number of the storage of `x`, of any shape."""
        storage = x.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0].expired():
            known = self._known[storage._cdata] = (StorageWeakRef(storage), self._next)
            self._next += 1
        return known[1]


class Tape(Recorder):
    """Records a step. `given`: weights and arguments, tensors of any shape that are there in every step."""

    def __init__(self, memory: LiveMemory, numbers: StorageNumbers, given: Iterable[Tensor]) -> None:
        super().__init__(memory)
        self.entries: list[Entry] = []
        self._numbers, self._made = numbers, {numbers.of(x) for x in given}

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        before = tuple(number for number in map(self._numbers.of, tensors) if number not in self._made)
        if func.namespace != "prim":
            text = f"{func} {', '.join(map(_text, leaves))}"
            self.entries.append(Entry(text, before, location() if before else ""))
        found = super().__torch_dispatch__(func, types, args, kwargs)
        taken = set(map(self._numbers.of, tensors))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and self._numbers.of(x) not in taken:
                self._made.add(self._numbers.of(x))
        return found


def _text(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{x.device.type} {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return type(x).__name__ if isinstance(x, torch.ScriptObject) else repr(x)


@dataclass(frozen=True, slots=True)
class Difference:
    """What prevents a replay. `operators`: pairs that differ; `reads`: waits by place; `moved`: buffers by place."""

    operators: tuple[str, ...]
    reads: Counter[str]
    moved: Counter[str]

    def __bool__(self) -> bool:
        return bool(self.operators or self.reads or self.moved)


def difference(tapes: Sequence[Tape]) -> Difference:
    """Compare steps that follow one another, four or more."""
    first = [entry.text for entry in tapes[0].entries]
    operators = [pair for tape in tapes[1:] for pair in _unequal(first, [entry.text for entry in tape.entries])]
    reads: Counter[str] = Counter()
    for tape in tapes:
        reads.update(tape.counts.syncs)
    return Difference(tuple(operators), reads, Counter() if operators else Counter(_moved(tapes)))


def _unequal(first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    yield from (f"{a}, then {b}" for a, b in zip(first, second, strict=False) if a != b)
    if len(first) != len(second):
        yield f"{len(first)} operators, then {len(second)}"


def _moved(tapes: Sequence[Tape]) -> Iterator[str]:
    """Yield the places of operators that take another storage of before in every step, or at least not in turns."""
    for entries in zip(*(tape.entries for tape in tapes), strict=True):
        taken = [entry.before for entry in entries]
        if any(taken[index] != taken[index + 2] for index in range(len(taken) - 2)):
            yield entries[0].where
