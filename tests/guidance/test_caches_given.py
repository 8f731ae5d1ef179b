"""Caches that a denoiser is given, with one call per branch: calls that fill them run on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.argument_changes import are_as_before, held_by
from patchpar.strategies.cfg.split import GuidanceSplit
from tests.unit.threads import on_threads


class Layer:
    def __init__(self) -> None:
        self.key: Tensor | None = None


class Cache:
    """Of two layers, as those of Qwen-Image 2.1 and FLUX.2 Klein."""

    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]


class Model:
    """Returns more tokens in the call that fills the cache."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, *, hidden_states: Tensor, text: Tensor, cache: Cache, mode: str) -> Tensor:
        self.calls.append(f"{mode} {float(text):.0f}")
        if mode == "extract":
            for layer in cache.layers:
                layer.key = 2 * text
        keys = [layer.key for layer in cache.layers]
        seen = hidden_states + sum(key for key in keys if key is not None)
        return torch.cat([text[None], seen]) if mode == "extract" else seen


def images(split: GuidanceSplit | None, clock: StepClock, model: Model, steps: tuple[int, ...]) -> list[float]:
    """The last prediction of each of several images of so many steps."""
    found = []
    for count in steps:
        clock.reset()
        clock.guided = True
        if split is not None:
            split.reset()
        caches, x = [Cache(), Cache()], torch.ones(2)
        for step in range(count):
            predictions = []
            for branch, cache in enumerate(caches):
                arguments: dict[str, Any] = {"hidden_states": x, "text": torch.tensor(1.0 + branch), "cache": cache}
                arguments["mode"] = "cached" if step else "extract"
                clock.next_call()
                whole = model.forward if split is None else lambda **each: split.denoise(model.forward, **each)
                predictions.append(whole(**arguments)[-2:] * 1)
            x = predictions[1] + 3 * (predictions[0] - predictions[1])
            clock.tick()
        if split is not None:
            split.finish()
        found.append(float(x.sum()))
    return found


def test_branches_with_a_cache_each() -> None:
    """The second image too, and one in which the first has had no step that reads."""
    steps = (1, 3, 4)
    want = images(None, StepClock(), Model(), steps)

    def rank(transport: Any) -> tuple[list[float], list[str]]:
        clock, model = StepClock(), Model()
        axis = Axis("cfg", transport.rank, 2, (0, 1))
        return images(GuidanceSplit(Communicator(transport), axis, clock), clock, model, steps), model.calls

    for number, (got, calls) in enumerate(on_threads(2, rank)):
        assert got == want
        assert calls.count("extract 1") == calls.count("extract 2") == len(steps), "what fills a cache runs everywhere"
        own, other = f"cached {1 + number}", f"cached {2 - number}"
        assert [calls.count(own), calls.count(other)] == [5, 1], "what reads it runs on one, but for the first time"


def test_what_is_held_is_seen_wherever_it_is() -> None:
    cache = Cache()
    before = held_by({"cache": cache, "x": torch.ones(2)})
    assert before == []
    assert are_as_before(before, held_by([cache]))
    cache.layers[1].key = torch.ones(2)
    filled = held_by([cache])
    assert not are_as_before(before, filled)
    assert are_as_before(filled, held_by([cache]))
    cache.layers[1].key.add_(1)
    assert not are_as_before(filled, held_by([cache])), "written to in place"
