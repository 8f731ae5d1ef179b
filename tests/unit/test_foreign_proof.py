"""Functions that foreign code calls are proved to be local without a trace in the generators that an image needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.shard.foreign.functions import FunctionCall, Many, Spec
from patchpar.shard.foreign.proof import is_local


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
