"""A denoiser is looked at when an image first reaches it, whenever that is, and after callbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.hooks import HookRegistry
from torch import nn

from patchpar.comm.traffic import CommStats
from patchpar.pipeline.denoiser_hook import DenoiserHook
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock


class Noting:
    """A layer of a plan that notes in which evaluations it was told to look again, and does nothing."""

    def __init__(self, clock: StepClock) -> None:
        self.clock, self.found, self.unsure = clock, list[int](), False

    def denoise(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self.unsure:
            self.found.append(self.clock.evaluation)
        self.unsure = False
        return forward(*args, **kwargs)


class Late:
    """Two denoisers, the second of which comes in from the third step on, or late in each step."""

    def __init__(self) -> None:
        self.clock, self.renewed = StepClock(), list[int]()
        self.layers = [Noting(self.clock), Noting(self.clock)]
        self.denoisers = [nn.Identity(), nn.Identity()]
        self.hooks = [self._hook(layer, module) for layer, module in zip(self.layers, self.denoisers, strict=True)]

    def _hook(self, layer: Noting, module: nn.Module) -> DenoiserHook:
        comm = SimpleNamespace(transport=SimpleNamespace(deadline=1.0), traffic=CommStats())
        note = lambda: self.renewed.append(self.clock.evaluation)  # noqa: E731
        votes: Any = SimpleNamespace(comm=comm, renew=note, restore=lambda: None)
        hook = DenoiserHook(self.clock, [layer], lambda: None, votes, plan=Plan())
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "denoiser")
        return hook

    def image(self, steps: list[list[int]], *, watched: bool = False) -> list[list[int]]:
        """When each denoiser was looked at; a step is the denoisers that it calls."""
        self.clock.reset()
        self.renewed.clear()
        for hook, layer in zip(self.hooks, self.layers, strict=True):
            hook.begin(watched=watched)
            layer.found.clear()
        for step in steps:
            for number in step:
                self.denoisers[number](torch.zeros(1))
            self.clock.tick()
        return [list(layer.found) for layer in self.layers]


class Emptying(nn.Module):
    """Takes the residuals that it is given out of their list, as HunyuanDiT does."""

    def forward(self, x: torch.Tensor, residuals: list[torch.Tensor]) -> torch.Tensor:
        while residuals:
            x = x + residuals.pop()
        return x


def test_a_model_that_empties_its_lists_can_be_asked_again() -> None:
    """What is looked at, checked or told of a failure is the call as it was."""
    asked = list[float]()

    class Check:
        denoiser: Any
        inner: Any

        def run(self, split: Any, plain: Any, call: Any, **_: Any) -> Any:
            result = split()
            asked.extend(float(plain(*call[0], **call[1])) for _ in range(2))
            return result

    module, comm = Emptying(), SimpleNamespace(transport=SimpleNamespace(deadline=1.0), traffic=CommStats())
    votes: Any = SimpleNamespace(comm=comm, renew=lambda: None, restore=lambda: None)
    check: Any = Check()
    check.denoiser = module
    hook = DenoiserHook(StepClock(), [], lambda: None, votes, check, plan=Plan())
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "denoiser")
    residuals = [torch.ones(()), torch.ones(())]
    assert float(module(torch.ones(()), residuals)) == 3
    assert residuals == [], "its own call is the model's own"
    assert asked == [3, 3]


def test_a_second_denoiser_is_looked_at_when_it_comes_in() -> None:
    two, steps = Late(), [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert two.image(steps) == [[0], [2]]
    assert two.image(steps) == [[0], [2]], "the same in the next picture"
    assert two.renewed == [0, 2], "the votes of its caches too"
    assert two.image([[0, 1], [0, 1]]) == [[0], [0]]


def test_after_callbacks_each_is_looked_at_once_in_a_step() -> None:
    assert Late().image([[0, 0], [0, 0], [1, 1]], watched=True) == [[0, 1], [2]]
