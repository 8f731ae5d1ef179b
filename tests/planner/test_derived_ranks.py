"""A rank that is derived from another plan's is the one that is recorded, to the operator, the message and the byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.pipeline.planner import derived_ranks, moved_events, record
from patchpar.pipeline.planner.call_log import Noted
from patchpar.pipeline.planner.derived_ranks import LoggedRanks
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.tape_recorder import TapeRecorder
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.plan import Plan
from tests import tiny
from tests.breadth import first_of
from tests.planner.on_ranks import call_of

WAYS = ["exact", "exact:overlap=true", "exact:ulysses=2", "exact:attention=ring", "exact:attention=two-way-ring"]
WAYS += ["exact:attention=token-ring", "exact:attention=ring:ulysses=2"]
MODELS = ("flux", "sdxl", "sd3", "pixart", "wan", "sd", "qwen", "hunyuan_video", "lumina2", "sana")


class Recorded:
    """Recordings of one model, each rank also without any log; `real`: the plans that were not derived."""

    def __init__(self, name: str, *, joined: bool) -> None:
        self.pipe, self.kwargs = tiny.build(name).pipe, call_of(name, 1)
        self.options, self.logged = RecordOptions(steps=1, joined=joined), LoggedRanks()
        self.of(Plan(patch=4), LoggedRanks())(0)  # what a first call finds, is known

    def of(self, plan: Plan, logged: LoggedRanks | None) -> Any:
        return Recording(self.pipe, plan, self.kwargs, self.options, logged).of_rank


@pytest.mark.parametrize("joined", [True, False], ids=["gpus", "cpu"])
@pytest.mark.parametrize("name", first_of(MODELS, "flux"))
def test_a_derived_rank_is_the_one_that_is_recorded(
    monkeypatch: pytest.MonkeyPatch, name: str, *, joined: bool
) -> None:
    ranks, real = Recorded(name, joined=joined), []
    run = record.Recording._recorded
    monkeypatch.setattr(record.Recording, "_recorded", lambda self, *args: real.append(self.plan) or run(self, *args))
    for rank in (1, 3):
        for way in WAYS:
            plan = Plan(patch=4, strategy=way)
            expected = ranks.of(plan, None)(rank)
            real.clear()
            found = ranks.of(plan, ranks.logged)(rank)
            assert found == expected, f"{plan}, rank {rank}"
            if name == "flux":  # UNets go on with the layout that each way has
                assert real == ([plan] if way == WAYS[0] else []), f"{plan}, rank {rank}"


@pytest.mark.parametrize(
    ("name", "base", "ways"),
    first_of(
        [
            ("flux", "patch=8", ["exact:attention=ring:ulysses=2"]),
            ("sdxl", "cfg=2,patch=4", ["exact:ulysses=2", "exact:attention=ring"]),
            ("flux", "cfg=2,patch=4", ["exact:attention=ring"]),  # calls by branch, of which the first rank has fewer
            *[(name, "cfg=2,patch=4", ["exact:attention=ring"]) for name in ("sd", "sd3", "pixart", "wan")],
        ],
        ("flux", "patch=8", ["exact:attention=ring:ulysses=2"]),
        ("sdxl", "cfg=2,patch=4", ["exact:ulysses=2", "exact:attention=ring"]),
    ),
)
def test_a_rank_that_was_not_recorded_is_derived_from_one_that_is_like_it(
    monkeypatch: pytest.MonkeyPatch, name: str, base: str, ways: list[str]
) -> None:
    ranks, real = Recorded(name, joined=True), []
    ranks.kwargs.pop("output_type", None)  # with the VAE
    ranks.of(Plan.parse(base), LoggedRanks())(0)  # a first call leaves something to the next one
    image = Recording(ranks.pipe, Plan.parse(base), ranks.kwargs, ranks.options, ranks.logged).of_image()
    like = {rank: each.steps for rank, each in enumerate(image.sources) if each.steps != rank}
    assert like, "some were not recorded"
    run = record.Recording._recorded
    monkeypatch.setattr(record.Recording, "_recorded", lambda self, *args: real.append(self.plan) or run(self, *args))
    for way, rank in product(ways, like):
        plan = Plan.parse(f"{base},strategy={way}")
        real.clear()
        found = ranks.of(plan, ranks.logged)(rank)
        if (name, base) in (("flux", "patch=8"), ("sdxl", "cfg=2,patch=4")):
            assert not real, f"{plan}, rank {rank} was recorded"
        assert found == ranks.of(plan, None)(rank), f"{plan}, rank {rank}"


def test_a_rank_with_the_peers_of_one_that_is_like_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is derived from a rank that is like it depends on where the rank is."""
    ranks, plan = Recorded("flux", joined=True), Plan(patch=8, strategy="exact:attention=ring")
    Recording(ranks.pipe, Plan(patch=8), ranks.kwargs, ranks.options, ranks.logged).of_image()
    expected = ranks.of(plan, ranks.logged)(4)
    found = ranks.of(plan, ranks.logged)(5)
    assert found.tape != expected.tape
    monkeypatch.setattr(moved_events.MovedPeers, "of", lambda self, event: moved_events.peer_of(event))
    assert ranks.of(plan, ranks.logged)(3).tape != ranks.of(plan, None)(3).tape


def test_a_rank_is_derived_from_one_that_is_like_it_only_after_that_was_checked() -> None:
    ranks, plan = Recorded("flux", joined=True), Plan(patch=8)
    for rank in (0, 4, 7):
        ranks.of(plan, ranks.logged)(rank)
    assert ranks.logged.find(plan, 4, 1) is not None
    assert ranks.logged.find(plan, 5, 1) is None
    Recording(ranks.pipe, plan, ranks.kwargs, ranks.options, ranks.logged).of_image()
    assert ranks.logged.find(plan, 5, 1) is not None


def test_an_order_of_peers_that_is_not_known_is_not_moved() -> None:
    run = [Noted(TapeRecorder, "send", (peer, {"kv": 8}, "kv", "attn")) for peer in (3, 1)]  # of rank 2
    moving = moved_events.MovedPeers(source=2, rank=3, peers={1: 2, 3: 4})
    with pytest.raises(moved_events.NotAlikeError):
        [*moved_events.in_order(run, moving)]
    found = [*moved_events.in_order(run[::-1], moving)]
    assert [each.args[0] for each in found] == [2, 4]


def test_a_rank_with_the_attention_of_the_first_plan_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is derived depends on the plan."""
    ranks = Recorded("flux", joined=True)
    first = ranks.of(Plan(patch=4), ranks.logged)(1)
    assert ranks.of(Plan(patch=4, strategy="exact:attention=ring"), ranks.logged)(1).tape != first.tape
    alone = derived_ranks.attention_alone

    def of_first(keys: AttentionMode, *args: Any) -> Any:
        return alone(AttentionMode(), *args)

    monkeypatch.setattr(derived_ranks, "attention_alone", of_first)
    assert ranks.of(Plan(patch=4, strategy="exact:attention=two-way-ring"), ranks.logged)(1).tape == first.tape


def test_a_plan_that_is_refused_is_refused_when_it_is_derived() -> None:
    ranks = Recorded("flux", joined=True)
    plan = Plan(patch=3, strategy="exact:ulysses=2")
    ranks.of(Plan(patch=3), ranks.logged)(0)
    messages = []
    for logged in (None, ranks.logged):
        with pytest.raises(PlanError) as refused:
            ranks.of(plan, logged)(0)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("plan", ["patch=2,strategy=displaced", "patch=2,weights=sharded", "stage=2,patch=2", "cfg=2"])
def test_other_plans_are_never_derived(plan: str) -> None:
    logged = LoggedRanks()
    assert not derived_ranks.is_exact(Plan.parse(plan))
    assert logged.find(Plan.parse(plan), 0, 1) is None
