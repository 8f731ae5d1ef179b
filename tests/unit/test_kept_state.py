"""What code of others keeps between calls of a network: after a comparison it is what it was, in all places at once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from patchpar.shard.foreign.kept_state import SavedState

CPU = torch.device("cpu")


class Keeping:
    """Stands for an attention processor that keeps something."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class OfClass:
    """Keeps what it keeps for all of its objects."""

    calls = 0


CALLS: list[int] = []


class OfModule:
    """Keeps it in a variable of its module."""

    def __call__(self) -> None:
        self.called()

    def called(self) -> None:
        CALLS.append(1)


class InSlots:
    __slots__ = ("__calls", "added")

    def __init__(self) -> None:
        self.__calls = 0

    def call(self) -> None:
        self.__calls += 1
        self.added = 1

    def state(self) -> Any:
        return self.__calls, hasattr(self, "added")


class OwnDict(dict[str, int]):
    """A container of another class."""


class OwnList(list[int]):
    """Another one."""


def network(*processors: Any) -> nn.Module:
    layers = nn.Sequential(*(nn.Identity() for _ in processors))
    for layer, processor in zip(layers, processors, strict=True):
        layer.processor = processor
    return layers


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda: itertools.count(3), next),
        (lambda: random.Random(0), lambda kept: kept.random()),
        (lambda: np.random.default_rng(0), lambda kept: kept.random()),
        (lambda: torch.Generator().manual_seed(0), lambda kept: float(torch.rand((), generator=kept))),
        (lambda: bytearray(b"abcd"), lambda kept: kept.pop()),
    ],
    ids=["count", "random", "numpy", "torch", "bytearray"],
)
@pytest.mark.parametrize("in_tuple", [False, True], ids=["itself", "in a tuple"])
def test_layers_that_take_from_one_source_still_do_so(
    make: Callable[[], Any], take: Callable[[Any], Any], *, in_tuple: bool
) -> None:
    source = make()
    processors = [Keeping((source, 0) if in_tuple else source) for _ in range(2)]
    state = SavedState(network(*processors), CPU)
    expected = [take(source) for _ in range(4)]
    assert state.has_changed
    for _ in range(2):
        state.put_back()
        found = [each.kept[0] if in_tuple else each.kept for each in processors]
        assert [take(found[number % 2]) for number in range(4)] == expected


def _calls_of_class() -> tuple[Any, Callable[[], object], Callable[[], Any]]:
    def call() -> None:
        OfClass.calls += 1
        OfClass.added = 1  # type: ignore[attr-defined]

    return OfClass(), call, lambda: (OfClass.calls, hasattr(OfClass, "added"))


def _calls_of_module() -> tuple[Any, Callable[[], object], Callable[[], Any]]:
    kept = OfModule()
    return kept, kept, lambda: CALLS.copy()


def _calls_in_slots() -> tuple[Any, Callable[[], object], Callable[[], Any]]:
    kept = InSlots()
    return kept, kept.call, kept.state


def _of_container(kept: Any, call: Callable[[], object]) -> tuple[Any, Callable[[], object], Callable[[], Any]]:
    return kept, call, lambda: kept.copy()


def _calls_in_cell() -> tuple[Any, Callable[[], object], Callable[[], Any]]:
    def function() -> Any:
        return calls

    def call() -> None:
        nonlocal calls
        calls = 1

    def state() -> Any:
        try:
            return function()
        except NameError:
            return "none yet"

    if False:
        calls = 0
    return function, call, state


def _in_a_set() -> Any:
    kept = {1, 2}
    return _of_container(kept, lambda: (kept.add(3), kept.remove(1)))


def _in_own_dict() -> Any:
    kept = OwnDict(one=1)
    return _of_container(kept, lambda: kept.update(one=2, other=3))


def _in_own_list() -> Any:
    kept = OwnList([1])
    return _of_container(kept, lambda: kept.append(2))


@pytest.mark.parametrize(
    "make", [_calls_of_class, _calls_of_module, _calls_in_slots, _calls_in_cell, _in_a_set, _in_own_dict, _in_own_list]
)
def test_what_a_call_has_changed_is_put_back(make: Callable[[], Any]) -> None:
    kept, call, read = make()
    processor = Keeping(kept)
    state, before = SavedState(network(processor), CPU), read()
    assert not state.has_changed
    call()
    after = read()
    assert after != before
    assert state.has_changed
    later = SavedState(network(processor), CPU)
    state.put_back()
    assert read() == before
    later.put_back()
    assert read() == after
    state.put_back()
    assert processor.kept is kept
