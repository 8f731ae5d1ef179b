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
from tests.planner.on_ranks import call_of, noted_again

MODELS = ("flux", "sd", "sdxl", "sd3", "pixart", "wan", "qwen", "auraflow", "ltx", "lumina2", "wan_i2v")


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of encoders that were not run."""
    return noted_again(monkeypatch, RepeatedEncoders)


class Recorded:
    """Recordings of a tiny pipeline, after what a first call finds. `encoders`: what is noted of them."""

    def __init__(self, name: str, again: list[str], *, joined: bool = True) -> None:
        self.pipe, self.kwargs = tiny.build(name).pipe, call_of(name, 1)
        self.options, self.encoders = RecordOptions(steps=1, joined=joined), dict[Any, Any]()
        self.alone("patch=2", 0)
        again.clear()

    def alone(self, plan: str, rank: int, **more: Any) -> Any:
        return Recording(self.pipe, Plan.parse(plan), self.kwargs | more, self.options).of_rank(rank)

    def of(self, plan: str, rank: int, **more: Any) -> Any:
        logged = LoggedRanks(encoders=self.encoders)  # nothing is derived
        return Recording(self.pipe, Plan.parse(plan), self.kwargs | more, self.options, logged).of_rank(rank)


@pytest.mark.parametrize("joined", [True, False], ids=["gpus", "cpu"])
@pytest.mark.parametrize("name", first_of(MODELS, "flux"))
def test_encoders_that_are_noted_again_are_those_that_run(again: list[str], name: str, *, joined: bool) -> None:
    ranks = Recorded(name, again, joined=joined)
    for plan, rank in (("patch=2", 0), ("patch=2", 1), ("patch=3", 2), ("single", 0)):
        assert ranks.of(plan, rank) == ranks.alone(plan, rank), f"{plan}, {rank}"
    if name == "flux":
        assert again[-2:] == ["text_encoder", "text_encoder_2"]


def test_another_text_is_encoded(again: list[str]) -> None:
    """Whose tokens have values, as those of Stable Diffusion; unknown words are all one token."""
    ranks = Recorded("sd", again)
    for _ in range(2):
        ranks.of("single", 0, prompt="a", negative_prompt="a a")
    assert not again
    ranks.of("single", 0, prompt="a a a", negative_prompt="a a a a")
    assert not again
    ranks.of("single", 0, prompt="a a", negative_prompt="a")
    assert again == ["text_encoder"] * 2


def test_encoders_with_another_forward_are_run(again: list[str]) -> None:
    """As adapters and users replace it."""
    ranks = Recorded("flux", again)
    for rank in (0, 1):
        plain = ranks.of("patch=2", rank)
    part = next(each for path, each in ranks.pipe.text_encoder.named_modules() if path.endswith("mlp"))
    again.clear()
    with HookSet() as hooks:
        forward = part.forward
        hooks.replace(part, "forward", lambda x: forward(forward(x)))
        changed = ranks.of("patch=2", 1)
        assert changed == ranks.alone("patch=2", 1)
    assert again[0] == "text_encoder_2"  # the other one ran
    assert changed.tape != plain.tape
    assert ranks.of("patch=2", 1) == plain


@pytest.mark.parametrize("plan", ["patch=2,encoders=one", "patch=2,weights=sharded"])
def test_encoders_that_are_not_whole_on_each_rank_are_recorded(again: list[str], plan: str) -> None:
    ranks = Recorded("flux", again)
    for rank in (0, 1, 1):
        ranks.of(plan, rank)
    assert not again


def test_other_ranks_get_what_the_first_one_encodes_when_that_is_derived() -> None:
    ranks, logged, plan = Recorded("flux", []), LoggedRanks(), "patch=2,encoders=one"
    options = ranks.options
    Recording(ranks.pipe, Plan.parse(plan), ranks.kwargs, options, logged).of_rank(0)
    found = Recording(ranks.pipe, Plan.parse(plan), ranks.kwargs, options, logged).of_rank(1)
    assert found == ranks.alone(plan, 1)
