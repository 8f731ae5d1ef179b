"""Functions that foreign code calls are proved to be local without a trace in the generators that an image needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.shard.foreign.functions import FunctionCall, Many, Spec
from patchpar.shard.foreign.proof import is_local
from patchpar.shard.foreign.same_work import are_alike, enlarged


def called(function: Callable[..., Any], *shape: int) -> FunctionCall:
    return FunctionCall(function, Many(tuple, (), (Spec(shape, torch.float32),)), Many(dict, (), ()))


def upper_half(size: int, own: int) -> Sequence[int] | None:
    return range(own) if size == 2 * own else None


def with_noise(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape[-1])


def of_all(x: Tensor) -> Tensor:
    return x - x.mean()


@pytest.mark.parametrize(("function", "wanted"), [(torch.exp, True), (with_noise, True), (of_all, False)])
def test_a_proof_leaves_the_generators(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], wanted: bool
) -> None:
    of_gpus, before = list[int](), torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", of_gpus.append)
    plain, own = called(function, 4, 6), called(function, 2, 6)
    assert is_local(plain, own, [upper_half], torch.device("cpu")) is wanted
    assert torch.equal(torch.get_rng_state(), before)
    assert not of_gpus


def sized(function: Callable[..., Any], shape: tuple[int, ...], *numbers: object) -> FunctionCall:
    return FunctionCall(function, Many(tuple, (), (Spec(shape, torch.float32), *numbers)), Many(dict, (), ()))


def test_the_plain_function_follows_from_those_of_a_smaller_call() -> None:
    """Sizes that are divided in the smaller call are divided in the larger one; others are the same in both."""
    smaller = sized(torch.reshape, (8, 6), 48, 2.0), sized(torch.reshape, (4, 6), 24, 2.0)
    found = enlarged(*smaller, sized(torch.reshape, (32, 7), 224, 3.0), [upper_half])
    assert found == sized(torch.reshape, (64, 7), 448, 3.0)


@pytest.mark.parametrize(
    ("plain", "own", "larger"),
    [
        (sized(torch.mul, (8,), 2.0), sized(torch.mul, (4,), 1.0), sized(torch.mul, (32,), 1.0)),
        (sized(torch.mul, (8, 1)), sized(torch.mul, (4,)), sized(torch.mul, (32,))),
        (sized(torch.mul, (9,)), sized(torch.mul, (3,)), sized(torch.mul, (0,))),
    ],
)
def test_a_plain_function_that_does_not_follow(plain: FunctionCall, own: FunctionCall, larger: FunctionCall) -> None:
    assert enlarged(plain, own, larger, [upper_half]) is None


@pytest.mark.parametrize(
    ("smaller", "larger", "wanted"),
    [((24, 2.0), (48, 2.0), True), ((24, 0.0), (24, 2.0), False), ((0, 2.0), (1, 2.0), False), ((2,), (2.0,), False)],
)
def test_calls_that_differ_by_sizes_only(smaller: Any, larger: Any, wanted: bool) -> None:
    found = [[sized(torch.mul, shape, *numbers)] for shape, numbers in (((4,), smaller), ((32,), larger))]
    assert are_alike(*found) is wanted
