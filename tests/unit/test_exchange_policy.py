"""Strategies as data: their options, what they refuse, their text, and what they ask of the seams."""

from __future__ import annotations

from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.plan.exchange_policy import CachedPartials, ExchangePolicy, StaleKV
from patchpar.plan.kv_selection import AllRows, NearRows, NearRowsAndPooled
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.stale.state import StaleState
from patchpar.strategies import known, parse_strategy, resolve_strategy
from patchpar.strategies.displaced import DisplacedPatch
from patchpar.strategies.exact import ExactPatch
from patchpar.strategies.fresh_edges import FreshEdges
from patchpar.strategies.pcpp import PartiallyConditioned
from patchpar.strategies.piped import PipedStages

STRATEGIES: tuple[Any, ...] = (
    ExactPatch(),
    DisplacedPatch(),
    DisplacedPatch(warmup_steps=1, group_norm="sync", preset="paper"),
    PartiallyConditioned(),
    PartiallyConditioned(fraction=0.125, context="paper", group_norm="separate"),
    PartiallyConditioned(fraction=1),
    PartiallyConditioned(text="split"),
    DisplacedPatch(text="whole"),
    FreshEdges(),
    FreshEdges(context="pooled", band=1e-05, pool=2, bits=4),
    FreshEdges(context="partials", refresh=8, warmup_steps=3),
    FreshEdges(quality=42.5),
    FreshEdges(quality=40, bits=8),
    FreshEdges(budget=0.25),
    PipedStages(),
    PipedStages(pieces=6, correction="none", text="each"),
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_text_and_back(strategy: Any) -> None:
    assert parse_strategy(str(strategy)) == strategy
    assert parse_strategy(str(strategy).replace(":", ",").replace(",", ":", 1)) == strategy
    assert resolve_strategy(strategy) is strategy
    assert Plan.parse(f"{strategy.axis}=2,strategy={strategy}").strategy in (strategy, str(strategy))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disp", "unknown strategy 'disp': use one of exact, fresh-edges, displaced, pcpp"),
        ("", "unknown strategy ''"),
        ("exact:warmup_steps=2", "strategy 'exact' does not know 'warmup_steps=2': its options are attention, ulysses"),
        ("displaced:fraction=0.3", "does not know 'fraction=0.3': its options are warmup_steps, group_norm, preset"),
        ("pcpp:warmup=3", "its options are fraction, warmup_steps, context, group_norm"),
        ("fresh-edges:pooled", "does not know 'pooled'"),
        ("fresh-edges:context=", "context has no value"),
    ],
)
def test_text_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_strategy(text)


@pytest.mark.parametrize("name", ["displaced", "pcpp", "fresh-edges"])
@pytest.mark.parametrize("steps", ["0", "-1", "1.5", "true", "many"])
def test_at_least_one_step_is_exact(name: str, steps: str) -> None:
    with pytest.raises(PlanError, match=rf"{name}: warmup_steps=.*: the first step has no stale values"):
        parse_strategy(f"{name}:warmup_steps={steps}")


@pytest.mark.parametrize(
    "text",
    [
        *(f"pcpp:fraction={value}" for value in ("0", "-0.1", "1.01", "nan", "inf", "true", "half")),
        *(f"fresh-edges:band={value}" for value in ("0", "2", "nan")),
        *(f"fresh-edges:pool={value}" for value in ("0", "-4", "2.5", "true")),
        *(f"fresh-edges:refresh={value}" for value in ("0", "1.5")),
        *(f"fresh-edges:bits={value}" for value in ("2", "32", "4.5", "few")),
        "fresh-edges:context=partials,bits=8",
        "fresh-edges:context=band",
        "fresh-edges:quality=30,budget=10",
        "fresh-edges:quality=-1",
        "fresh-edges:budget=0",
        "displaced:group_norm=async",
        "displaced:preset=distrifusion",
        "pcpp:context=all",
        "pcpp:text=auto",
        "displaced:text=stale",
        "fresh-edges:text=none",
    ],
)
def test_options_out_of_bounds_are_named(text: str) -> None:
    name, _, options = text.partition(":")
    option = options.rpartition(",")[2].partition("=")[0]
    with pytest.raises(PlanError, match=rf"{name}: .*{option}="):
        parse_strategy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fresh-edges:band=0.2", "band=0.2 changes nothing with context=all: use context=pooled, or leave band out"),
        ("fresh-edges:context=partials,pool=8", "pool=8 changes nothing with context=partials: use context=pooled"),
        ("fresh-edges:context=pooled,refresh=2", "refresh=2 changes nothing with context=pooled: use context=partials"),
        ("fresh-edges:context=partials,correction=linear", "correction=linear changes nothing with context=partials"),
        ("structure:guide=flow,structure_strength=0", "guide=flow changes nothing with structure_strength=0"),
        ("structure:guide=flow,preset=paper", "guide=flow changes nothing .*=0, that of preset=paper"),
        ("structure:margin=0.1,overlap=0.3", "overlap=0.3 changes nothing with margin=0.1: leave one of them out"),
    ],
)
def test_options_that_would_change_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_strategy(text)


def test_options_of_their_context_are_not_refused() -> None:
    for text in (
        "fresh-edges:context=pooled,band=0.2,pool=8,correction=linear",
        "fresh-edges:context=partials,refresh=2,correction=none",
        "structure:guide=flow,preset=paper,structure_strength=0.5",
        "structure:margin=0.1",
    ):
        assert str(parse_strategy(text)).startswith(text.partition(":")[0])


def test_every_name_is_known() -> None:
    assert {name: found.name for name, found in known().items()} == {name: name for name in known()}
    assert set(known()) - {"structure"} == {strategy.name for strategy in STRATEGIES}  # structure has no seams to treat


@pytest.mark.parametrize("wrong", [None, 3, ExchangePolicy(), "nothing"])
def test_what_is_no_strategy(wrong: Any) -> None:
    with pytest.raises(PlanError, match="exact, fresh-edges, displaced, pcpp"):
        resolve_strategy(wrong)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_policies(strategy: Any) -> None:
    policy = strategy.policy
    assert policy.name == strategy.name
    assert policy.remembers == (strategy != ExactPatch())
    assert policy.warmup_steps == getattr(strategy, "warmup_steps", None)
    edges = "fresh" if strategy.name in ("exact", "fresh-edges", "piped") else "stale"
    assert policy.halo == edges
    assert policy.published == (getattr(strategy, "preset", None) == "paper")


@pytest.mark.parametrize(
    ("given", "moments"),
    [
        ("corrected", "corrected"),
        ("guarded", "guarded"),
        ("stale", "stale"),
        ("separate", "separate"),
        ("sync", "fresh"),
    ],
)
def test_group_norms(given: Any, moments: str) -> None:
    assert DisplacedPatch(group_norm=given).policy.moments == moments
    assert PartiallyConditioned(group_norm=given).policy.moments == moments


def test_contexts() -> None:
    found = [
        FreshEdges(bits=8),
        FreshEdges(context="pooled", band=0.2, pool=3),
        FreshEdges(extrapolated=False, correction="none"),
        FreshEdges(context="partials"),
    ]
    assert [strategy.policy.context for strategy in found] == [
        StaleKV(selection=AllRows(), bits=8, extrapolated=True, correction="affine"),
        StaleKV(selection=NearRowsAndPooled(0.2, 3), extrapolated=True, correction="affine"),
        StaleKV(selection=AllRows()),
        CachedPartials(refresh=4),
    ]
    paper, ours = (PartiallyConditioned(context=context).policy.context for context in ("paper", "band"))
    assert ours == StaleKV(selection=NearRows(0.3))
    assert paper == StaleKV(selection=NearRows(1.0), narrow_to=NearRows(0.3))


def test_text_is_split_where_it_is_a_small_part_of_what_is_sent() -> None:
    split = [DisplacedPatch(), FreshEdges(), FreshEdges(context="pooled", text="split"), ExactPatch()]
    whole = [DisplacedPatch(text="whole"), PartiallyConditioned(), FreshEdges(bits=8), FreshEdges(context="pooled")]
    assert {strategy.policy.text for strategy in split} == {"split"}
    assert {strategy.policy.text for strategy in whole} == {"whole"}


def test_a_budget_is_in_mebibytes() -> None:
    resync = FreshEdges(budget=1.5).policy.resync
    assert resync is not None
    assert resync.budget == 1.5 * 2**20


def test_frozen_uses_nothing_of_this_step() -> None:
    for strategy in STRATEGIES[1:]:
        frozen = strategy.policy.frozen()
        assert frozen.halo == "stale"
        assert frozen.moments != "fresh"
        assert frozen.context == strategy.policy.context


def test_without_a_clock_nobody_knows_what_the_last_step_is() -> None:
    comm: Any = None  # it is not looked at
    with pytest.raises(PlanError, match="'pcpp' uses stale values, so it needs the step clock"):
        StaleState(comm, PartiallyConditioned().policy, None)
    assert ExactPatch().policy.remembers is False
    assert StepClock().step == 0
