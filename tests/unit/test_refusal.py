"""What fails when a model's work is split is refused in words; what fails anyway fails as it would."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry
from torch import Tensor, nn

from patchpar.comm.traffic import CommStats
from patchpar.errors import ExchangeError, UnsupportedModel
from patchpar.pipeline.denoiser_hook import DenoiserHook
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock


class Denoiser(nn.Module):
    """Fails on what is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("x is not finite")
        return 2 * x


class Failing:
    """A layer of a plan in which `error` is raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def denoise(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        raise self.error


def run(error: Exception, x: Tensor, **plan: int) -> Any:
    return called([Failing(error)], x, **plan)


def called(layers: list[Any], x: Tensor, denoiser: nn.Module | None = None, **plan: int) -> Any:
    denoiser = denoiser or Denoiser()
    comm = SimpleNamespace(transport=SimpleNamespace(deadline=1.0), traffic=CommStats())
    votes: Any = SimpleNamespace(comm=comm, renew=lambda: None, restore=lambda: None)
    hook = DenoiserHook(StepClock(), layers, lambda: None, votes, plan=Plan(**plan))
    HookRegistry.check_if_exists_or_initialize(denoiser).register_hook(hook, "denoiser")
    return denoiser(x)


@pytest.mark.parametrize(
    "error", [IndexError("index 4 is out of bounds"), RuntimeError("size a\nand b"), AssertionError()]
)
def test_it_names_plan_class_reason_and_what_works(error: Exception) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        run(error, torch.ones(2), patch=2)
    message = str(raised.value)
    reason = f"{type(error).__name__}: {error}".replace("\n", " ").removesuffix(": ")
    assert message.startswith("Denoiser cannot be run with plan patch=2,strategy=exact: with its work split it fails")
    assert f"on one rank it does not ({reason}). " in message
    assert message.endswith("Use plan cfg=2 or data=N, which do not split the image")
    assert raised.value.__cause__ is error
    with pytest.raises(
        UnsupportedModel, match=re.escape("Use cfg=1, and give the devices to another axis, e.g. patch=2")
    ):
        run(error, torch.ones(2), cfg=2)


def test_what_fails_without_us_too_is_the_models_own_error() -> None:
    with pytest.raises(ValueError, match="x is not finite") as raised:
        run(RuntimeError("no"), torch.tensor([torch.nan]), patch=2)
    assert type(raised.value) is ValueError


@pytest.mark.parametrize(
    "error",
    [
        ExchangeError("late"),
        torch.OutOfMemoryError("full"),
        MemoryError("full"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 1 bytes."),
        UnsupportedModel("in words"),
    ],
    ids=str,
)
def test_what_says_enough_is_passed_on(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        run(error, torch.ones(2), patch=2)
    assert raised.value is error


def test_gradients_are_refused_before_any_rank_works() -> None:
    """What a pipeline does with them decides how often it calls the denoiser next, on each rank for itself."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(
        UnsupportedModel, match=r"gradients are taken through Denoiser, whose work plan cfg=2.*Use one device"
    ):
        run(AssertionError("it works"), x, cfg=2)
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="it works"):
        run(AssertionError("it works"), x, cfg=2)
    with pytest.raises(UnsupportedModel, match="cover several prompts"):
        called([], x, data=2)
    assert called([], x).requires_grad


class Store:
    """An attention processor that keeps what it has computed."""

    def __init__(self) -> None:
        self.weights = torch.zeros(1)
        self.probabilities: Tensor | None = None


class Watched(nn.Module):
    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.attn = nn.Identity()
        self.attn.processor, self.keeps = Store(), keeps

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.attn.processor.probabilities = x.softmax(-1)
        return 2 * x


def test_what_attention_processors_keep_of_a_part_is_refused() -> None:
    """Self-attention guidance reads the weights of the whole batch and of all tokens there."""
    with pytest.raises(UnsupportedModel, match=r"processor of attn in Watched keeps probabilities .*Use one device"):
        called([], torch.ones(2), Watched(keeps=True), patch=2)
    assert called([], torch.ones(2), Watched(keeps=False), patch=2).sum() == 4
    assert called([], torch.ones(2), Watched(keeps=True), data=2).sum() == 4


class Adding(Watched):
    """One whose processor has kept something already."""

    def __init__(self) -> None:
        super().__init__(keeps=False)
        self.attn.processor.maps = [torch.zeros(2)]

    def forward(self, x: Tensor) -> Tensor:
        self.attn.processor.maps.append(x.softmax(-1))
        return 2 * x


def test_what_they_add_to_what_they_have_is_refused_too() -> None:
    """As one that has appended to a list before the model was made parallel, or in a call that was refused."""
    with pytest.raises(UnsupportedModel, match="processor of attn in Adding keeps maps"):
        called([], torch.ones(2), Adding(), patch=2)
