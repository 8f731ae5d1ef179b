"""A search is the same, plan by plan, when each rank is recorded alone: nothing derived, noted again or shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from patchpar.pipeline.planner import derived_ranks
from patchpar.pipeline.planner.derived_ranks import LoggedRanks
from patchpar.pipeline.planner.image_ranks import ImageRanks
from patchpar.pipeline.planner.kept_tapes import CallFacts
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.search import search
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.pipeline.planner.tape_recorder import ENCODE
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.shard.verification_cache import VerificationCache
from tests.breadth import first_of
from tests.planner.on_ranks import call_of
from tests.planner.test_repeated_blocks import longer

SIDE = 512
"""Pixels of a side."""


class Case(NamedTuple):
    """A model's guidance branches, and how many plans a search tries at least.

    `rate`: of the devices, which have one processor: a tiny model computes long enough for plans to differ.
    """

    branches: int
    plans: int
    rate: float


MODELS = {"flux": Case(1, 6, 0.05), "sd": Case(2, 4, 0.005), "wan": Case(2, 4, 0.005)}


class Searched:
    """A search for a plan of a tiny model. `alone`: each rank is recorded without the others."""

    def __init__(self, folder: Path, name: str, machine: str, *, alone: bool) -> None:
        self.pipe, self.alone, branches = longer(name), alone, MODELS[name].branches
        self.kwargs = call_of(name, 1) | {"height": SIDE, "width": SIDE}
        self.kwargs.pop("output_type", None)  # with the VAE
        self.options, self.logged = RecordOptions(steps=1, joined=True), LoggedRanks()
        if alone:
            for plan in (Plan(), Plan(patch=2), Plan(cfg=branches, patch=2)):  # what first calls find
                Recording(self.pipe, plan, self.kwargs, self.options).of_rank(0)
        found = Simulator("embedded", machine, {"graphs": True}, {}, VerificationCache(folder / f"{alone}"))
        assert isinstance(found.machine, Machine)
        device = found.machine.device
        flops = {dtype: MODELS[name].rate * rate for dtype, rate in device.flops.items()}
        found.machine = replace(found.machine, device=replace(device, flops=flops, processors=1))
        found.__dict__["_model"] = SimpleNamespace(call=CallFacts(branches=branches, steps=4), ranks=self.ranks)
        self.recorded: dict[Plan, ImageRanks] = {}
        self.result = search(found.machine, branches, "exact", found.of)

    def ranks(self, plan: Plan, steps: int) -> ImageRanks:
        """See EmptyModel."""
        logged = None if self.alone else self.logged
        recording = Recording(self.pipe, plan, self.kwargs, self.options.with_steps(steps), logged)
        found = self.recorded[plan] = recording.of_image()
        return found


@pytest.mark.parametrize("name", first_of(tuple(MODELS), "flux"))
def test_a_search_is_that_of_ranks_that_are_recorded_alone(tmp_path: Path, name: str) -> None:
    found, alone = (Searched(tmp_path, name, "4xH100-nvlink", alone=each) for each in (False, True))
    assert len(found.recorded) >= MODELS[name].plans, "plans were tried"
    assert found.recorded.keys() == alone.recorded.keys()
    for plan, ranks in alone.recorded.items():
        for rank, (one, other) in enumerate(zip(found.recorded[plan].ranks, ranks.ranks, strict=True)):
            assert without_memory(one) == without_memory(other), f"{plan}, rank {rank}"
            assert_memory(one.peaks, other.peaks, f"{plan}, rank {rank}")
    assert [each.plan for each in found.result.ranked] == [each.plan for each in alone.result.ranked]
    assert [each.replayed for each in found.result.ranked] == [each.replayed for each in alone.result.ranked]
    assert [each.fits for each in found.result.ranked] == [each.fits for each in alone.result.ranked]
    assert found.result.refused == alone.result.refused
    assert found.result.skipped == alone.result.skipped


def without_memory(rank: RecordedRank) -> RecordedRank:
    return replace(rank, peaks={}, working={})


def assert_memory(found: Mapping[str, int], alone: Mapping[str, int], where: str) -> None:
    """A call of the same model before may have left a small tensor, which counts: never less, and hardly more."""
    assert found.keys() == alone.keys()
    for phase, peak in alone.items():
        most = 2 * peak if phase == ENCODE else 1.001 * peak  # encoders of tiny models are no larger than a latent
        assert peak <= found[phase] <= most, f"{where}, {phase}"


def test_a_search_with_attention_of_other_plans_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is derived decides."""
    alone = derived_ranks.attention_alone
    expected = Searched(tmp_path / "expected", "flux", "2xH100-nvlink", alone=False)
    monkeypatch.setattr(derived_ranks, "attention_alone", lambda keys, *args: alone(AttentionMode(), *args))
    found = Searched(tmp_path / "found", "flux", "2xH100-nvlink", alone=False)
    assert found.result.as_dict() != expected.result.as_dict()
