"""Steps that follow one another could be replayed as one CUDA graph, see `benchmarks.gpu.tape`, at full width.

Every strategy runs the same operators in every steady step, reads nothing from the device, and takes what the step
before has left from where it lay in that step. `test_step_graphs` shows that a replay computes the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.denoisers import Denoiser
from benchmarks.gpu.strategies import FakeRank
from benchmarks.gpu.tape import difference
from patchpar.shard.stale.cache import StaleCache
from tests.gpu.short_models import LAYERS

POOLED, PARTIALS = "fresh-edges:context=pooled", "fresh-edges:context=partials,refresh=1"
STRATEGIES = ("exact", "displaced", "pcpp", "fresh-edges", "fresh-edges:correction=none", POOLED, PARTIALS)
DAILY = {
    ("flux", "fresh-edges"),
}


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        pytest.param(model, strategy, marks=() if (model, strategy) in DAILY else pytest.mark.breadth)
        for model in LAYERS
        for strategy in STRATEGIES
    ],
)
def test_steady_steps_are_the_same_operators_on_the_same_memory_and_read_nothing(
    rank: FakeRank, models: dict[str, Denoiser], model: str, strategy: str
) -> None:
    tapes = rank.tapes(models[model], strategy)
    assert len(tapes) >= 4
    assert len(tapes[0].entries) > 100
    found = difference(tapes)
    assert not found.operators
    assert not found.reads
    assert not found.moved
    assert not any(tape.counts.copies for tape in tapes), "no graph copies from the host what may change there"


def during_the_end_of_calls(monkeypatch: pytest.MonkeyPatch, seeded: Any) -> None:
    end = StaleCache.end

    def ending(cache: StaleCache) -> None:
        seeded()
        end(cache)

    monkeypatch.setattr(StaleCache, "end", ending)


def test_a_number_that_the_process_decides_is_found(
    rank: FakeRank, models: dict[str, Denoiser], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    x = torch.zeros(1, device="cuda:0")

    def decided() -> None:
        calls.append(None)
        x.mul(len(calls))

    during_the_end_of_calls(monkeypatch, decided)
    assert len(difference(rank.tapes(models["flux"], "displaced")).operators) == 3


def test_a_value_that_is_read_is_found(
    rank: FakeRank, models: dict[str, Denoiser], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(1, device="cuda:0")
    during_the_end_of_calls(monkeypatch, x.item)
    assert sum(difference(rank.tapes(models["flux"], "displaced")).reads.values()) == 4


@pytest.mark.breadth
def test_buffers_in_turns_are_allowed_and_a_new_one_in_every_step_is_found(
    rank: FakeRank, models: dict[str, Denoiser], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = sum(difference(rank.tapes(models["flux"], "displaced")).moved.values())
    turns = [torch.zeros(1, device="cuda:0") for _ in range(2)]

    def in_turns() -> None:
        turns[0].add_(1)
        turns.reverse()

    with monkeypatch.context() as patch:
        during_the_end_of_calls(patch, in_turns)
        assert sum(difference(rank.tapes(models["flux"], "displaced")).moved.values()) == known

    def anew() -> None:
        turns[0] = turns[0] + 1

    during_the_end_of_calls(monkeypatch, anew)
    assert sum(difference(rank.tapes(models["flux"], "displaced")).moved.values()) == known + 1
