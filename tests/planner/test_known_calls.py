"""What calls for one guidance branch return is learnt in one first call, for other ranks and plans."""

from __future__ import annotations

from typing import Any

import pytest

from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.recording_runner import RecordingRunner
from patchpar.plan.plan import Plan
from tests import tiny
from tests.breadth import first_of
from tests.planner.on_ranks import call_of

MODELS = ("wan", "qwen", "ltx", "cogview4", "lumina2")
BRANCHES, PATCHES = Plan(cfg=2), Plan(cfg=2, patch=2)


class Recorded:
    """Recordings of one model. `calls`: how many pipeline calls the last one has made."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pipe, self.kwargs, self.calls = tiny.build(name).pipe, call_of(name, 2), 0
        run = RecordingRunner.generate

        def counted(runner: RecordingRunner, *args: Any) -> Any:
            self.calls += 1
            return run(runner, *args)

        monkeypatch.setattr(RecordingRunner, "generate", counted)

    def of(self, plan: Plan, rank: int, options: RecordOptions, **changes: Any) -> Any:
        self.calls = 0
        return Recording(self.pipe, plan, self.kwargs | changes, options).of_rank(rank)

    def options(self) -> RecordOptions:
        """Where nothing is known but what a plan without guidance branches shows."""
        found = RecordOptions(steps=2, joined=True)
        self.of(Plan(), 0, found)
        self.of(Plan(patch=2), 0, found)
        return found


@pytest.mark.parametrize("name", first_of(MODELS, "wan"))
def test_other_ranks_and_plans_have_no_first_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ranks = Recorded(name, monkeypatch)
    options = ranks.options()
    ranks.of(BRANCHES, 0, options)
    assert ranks.calls == 2
    assert options.learnt.calls_by_branch
    for plan in (BRANCHES, PATCHES):
        for rank in range(plan.world_size):
            found = ranks.of(plan, rank, options)
            assert ranks.calls == 1, f"{plan}, rank {rank}"
            expected = ranks.of(plan, rank, ranks.options())
            assert found.tape == expected.tape, f"{plan}, rank {rank}"
            assert found.stale_bytes == expected.stale_bytes
            for phase, most in found.peaks.items():  # but for what a first call has left
                assert expected.peaks[phase] / 1.5 <= most <= expected.peaks[phase], f"{plan}, rank {rank}"


def test_a_call_of_another_form_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is known of another size is not taken for it, and its first call is not what is recorded."""
    ranks = Recorded("wan", monkeypatch)
    options, larger = ranks.options(), {"height": 2 * ranks.kwargs["height"]}
    ranks.of(BRANCHES, 0, options)
    found = ranks.of(BRANCHES, 0, options, **larger)
    assert ranks.calls == 2
    expected = ranks.of(BRANCHES, 0, ranks.options(), **larger)
    assert found.tape == expected.tape
    assert found.tape != ranks.of(BRANCHES, 0, options).tape


@pytest.mark.parametrize("plan", ["cfg=2,patch=2,strategy=displaced", "cfg=2,weights=sharded"])
def test_plans_that_keep_more_have_one(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    ranks = Recorded("wan", monkeypatch)
    options = ranks.options()
    ranks.of(BRANCHES, 0, options)
    known = dict(options.learnt.forms)
    ranks.of(Plan.parse(plan), 1, options)
    assert ranks.calls == 2
    assert options.learnt.forms == known
