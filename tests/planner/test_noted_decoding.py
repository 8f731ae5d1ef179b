"""What ranks that split the VAE learn in a first call, they learn from what it decodes alone."""

from __future__ import annotations

from typing import Any

import pytest

from patchpar.pipeline.planner.derived_ranks import LoggedRanks
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.recording_runner import RecordingRunner
from patchpar.plan.plan import Plan
from tests import tiny
from tests.breadth import first_of
from tests.planner.on_ranks import call_of

MODELS = ("flux", "sd3", "pixart", "wan", "qwen", "ltx", "hunyuan_video", "cogvideox", "sana")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run: whole calls, and decodings alone."""
    found: list[str] = []
    for name in ("generate", "decode"):
        run = getattr(RecordingRunner, name)

        def noted(self: Any, *args: Any, name: str = name, run: Any = run) -> Any:
            found.append(name)
            return run(self, *args)

        monkeypatch.setattr(RecordingRunner, name, noted)
    return found


def of_rank(pipe: Any, name: str, plan: Plan, rank: int, options: RecordOptions) -> Any:
    kwargs = {key: value for key, value in call_of(name, 1).items() if key != "output_type"}
    return Recording(pipe, plan, kwargs, options, LoggedRanks()).of_rank(rank)


@pytest.mark.parametrize("name", first_of(MODELS, "flux"))
def test_a_rank_that_has_decoded_alone_is_one_after_a_whole_call(calls: list[str], name: str) -> None:
    pipe, plan = tiny.build(name).pipe, Plan(patch=2)
    whole, alone = RecordOptions(steps=1, joined=True), RecordOptions(steps=1, joined=True)
    of_rank(pipe, name, plan, 0, whole)
    assert calls == ["generate", "generate"]
    expected = of_rank(pipe, name, plan, 0, whole)
    of_rank(pipe, name, Plan(), 0, alone)
    assert any(whole.learnt.feeds.values())
    assert not any(alone.learnt.feeds.values())
    calls.clear()
    found = of_rank(pipe, name, plan, 0, alone)
    assert calls == ["decode", "generate"]
    assert found == expected
    assert alone.learnt.feeds == whole.learnt.feeds
    assert of_rank(pipe, name, plan, 1, alone) == of_rank(pipe, name, plan, 1, whole)


def test_denoisers_that_learn_have_a_whole_first_call(calls: list[str]) -> None:
    """Whose exchange points are found in it."""
    pipe, options = tiny.build("sd").pipe, RecordOptions(steps=1, joined=True)
    of_rank(pipe, "sd", Plan(), 0, options)
    calls.clear()
    of_rank(pipe, "sd", Plan(patch=2), 0, options)
    assert calls == ["generate", "generate"]
