"""Encoders that were noted again, rather than run, are the recorded ones to the operator and the byte."""

from __future__ import annotations

from typing import Any

import pytest

from patchpar.pipeline.planner.derived_ranks import LoggedRanks
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.repeated_encoders import RepeatedEncoders
from patchpar.plan.plan import Plan
from patchpar.shard.hooks import HookSet
from tests import tiny
from tests.breadth import first_of
from tests.planner.on_ranks import call_of

MODELS = ("flux", "sd", "sdxl", "sd3", "pixart", "wan", "qwen", "auraflow", "ltx", "lumina2", "wan_i2v")


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of encoders that were not run."""
    names: list[str] = []
    run = RepeatedEncoders._again

    def noted(self: RepeatedEncoders, found: Any, path: str, *args: Any) -> Any:
        names.append(path)
        return run(self, found, path, *args)

    monkeypatch.setattr(RepeatedEncoders, "_again", noted)
    return names


class Recorded:
    """Recordings of a tiny pipeline, after what a first call finds."""

    def __init__(self, name: str, *, joined: bool = True) -> None:
        self.pipe, self.kwargs = tiny.build(name).pipe, call_of(name, 1)
        self.options, self.logged = RecordOptions(steps=1, joined=joined), LoggedRanks()
        self.of("patch=2", 0, LoggedRanks())

    def of(self, plan: str, rank: int, logged: LoggedRanks | None, **more: Any) -> Any:
        return Recording(self.pipe, Plan.parse(plan), self.kwargs | more, self.options, logged).of_rank(rank)


@pytest.mark.parametrize("joined", [True, False], ids=["gpus", "cpu"])
@pytest.mark.parametrize("name", first_of(MODELS, "flux"))
def test_encoders_that_are_noted_again_are_those_that_run(again: list[str], name: str, *, joined: bool) -> None:
    ranks = Recorded(name, joined=joined)
    for plan, rank in (("patch=2", 0), ("patch=2", 1), ("patch=3", 0), ("patch=3", 2), ("single", 0)):
        assert ranks.of(plan, rank, ranks.logged) == ranks.of(plan, rank, None), f"{plan}, {rank}"
    if name == "flux":
        assert again == ["text_encoder", "text_encoder_2"] * 3  # two recordings have shown that they do the same


def test_another_text_is_encoded(again: list[str]) -> None:
    """Which has other tokens, however many they are."""
    ranks = Recorded("flux")
    for rank in (0, 1):
        ranks.of("patch=2", rank, ranks.logged, prompt="a red fox")
    ranks.of("patch=2", 0, ranks.logged, prompt="a red box")
    assert not again
    ranks.of("patch=2", 0, ranks.logged, prompt="a red fox")
    assert again


def test_encoders_with_another_forward_are_run(again: list[str]) -> None:
    """As adapters and users replace it."""
    ranks = Recorded("flux")
    for rank in (0, 1):
        ranks.of("patch=2", rank, ranks.logged)
    plain = next(each for path, each in ranks.pipe.text_encoder.named_modules() if path.endswith("mlp"))
    with HookSet() as hooks:
        forward = plain.forward
        hooks.replace(plain, "forward", lambda x: forward(forward(x)))
        expected = ranks.of("patch=2", 0, None)
        assert ranks.of("patch=2", 0, ranks.logged) == expected
    assert again == ["text_encoder_2"]
    assert ranks.of("patch=2", 0, ranks.logged) != expected


@pytest.mark.parametrize("plan", ["patch=2,encoders=one", "patch=2,weights=sharded", "stage=2"])
def test_encoders_that_are_not_whole_on_each_rank_are_recorded(again: list[str], plan: str) -> None:
    ranks = Recorded("flux")
    for rank in (0, 1, 0, 1):
        ranks.of(plan, rank, ranks.logged)
    assert not again
