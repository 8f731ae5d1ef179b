"""Every plan prints as what parses to it: drawn at random over all strategies and every value of their options."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from patchpar.cli.flags import plan_of
from patchpar.errors import PlanError
from patchpar.pipeline.startup import plan_of as plan_asked_for
from patchpar.plan.attention_mode import ALGORITHMS
from patchpar.plan.exchange_policy import BITS
from patchpar.plan.plan import AXIS_MEANINGS, ENCODERS, SPLITS, Plan
from patchpar.strategies import known, parse_strategy
from patchpar.strategies.displaced import DisplacedPatch
from patchpar.strategies.exact import ExactPatch
from patchpar.strategies.fresh_edges import FreshEdges
from patchpar.strategies.structure.options import StructureGuidance

GENERATES = 400
NAMED = {
    "attention": tuple(ALGORITHMS),
    "bits": BITS,
    "lag": (0, 1),
    "native": (None, 8, 512),
}  # types say less than is valid


def values_of(option: Field[Any], hint: Any, chance: random.Random) -> list[Any]:
    """Some values that an option of this type may have, its default among them."""
    if option.name in NAMED:
        return list(NAMED[option.name])
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    found: list[Any] = [option.default]
    for kind in kinds:
        if get_origin(kind) is Literal:
            found += get_args(kind)
        else:
            generated = {int: chance.randint(1, 9), float: chance.choice((chance.random(), 1.0, 1e-07, 0.5))}
            found += [True, False] if kind is bool else [None if kind is NoneType else generated[kind]]
    return found


def strategies_at_random(kind: type[Any], chance: random.Random) -> Iterator[Any]:
    """Strategies of one class. What its options refuse together is drawn again."""
    hints = get_type_hints(kind)
    while True:
        changed = [option for option in fields(kind) if chance.random() < 0.4]
        try:
            yield kind(
                **{option.name: chance.choice(values_of(option, hints[option.name], chance)) for option in changed}
            )
        except PlanError:
            continue


@pytest.mark.parametrize("name", known())
def test_every_plan_prints_as_what_parses_to_it(name: str) -> None:
    chance, kind, seen = random.Random(name), known()[name], Counter[str]()
    generated = strategies_at_random(kind, chance)
    for _ in range(GENERATES):
        strategy = next(generated)
        seen.update(option.name for option in fields(kind) if getattr(strategy, option.name) != option.default)
        degrees = {axis: chance.choice((1, 2, 3)) for axis in AXIS_MEANINGS}
        if kind.axis == "stage":
            degrees |= {"stage": chance.choice((2, 3)), "patch": 1, "tensor": 1}
        if degrees["stage"] > 1 and degrees["tensor"] > 1:
            degrees[chance.choice(("stage", "tensor"))] = 1
        shards = degrees["cfg"] * degrees["patch"] > 1 and degrees["tensor"] == degrees["stage"] == 1
        hosts = degrees["tensor"] == 1
        kinds = ("sharded",) * shards + ("hosted",) * hosts
        weights = {"weights": chance.choice(kinds), "resident": chance.choice((0, 3))} if kinds else {}
        options = chance.choice(({}, weights, {"encoders": chance.choice(ENCODERS)}))
        plan = Plan(**degrees, strategy=strategy, split=chance.choice(SPLITS), **options)
        assert Plan.parse(str(plan)) == plan
        assert Plan.parse(str(plan).replace(":", ",")) == plan
        assert plan_of(str(plan), None, "auto") == plan
        assert parse_strategy(str(strategy)) == strategy
    assert set(seen) == {option.name for option in fields(kind)}, "some option was never varied"


def test_a_printed_plan_is_one_that_devices_can_be_asked_for() -> None:
    plan = Plan(cfg=2, patch=2, strategy=FreshEdges(context="pooled", bits=4))
    assert plan_asked_for(str(plan)) == plan
    assert plan_asked_for("single") == plan_of("single", None, "auto") == Plan.parse(" single ") == Plan()


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        (
            "patch=4,strategy=fresh-edges:context=pooled,bits=4",
            Plan(patch=4, strategy=FreshEdges(context="pooled", bits=4)),
        ),
        ("strategy=fresh-edges, bits = 4 ,patch=4", Plan(patch=4, strategy=FreshEdges(bits=4))),
        ("patch=2,strategy=displaced:warmup_steps=2,split=rows,cfg=2", None),
        (
            "patch=4,strategy=exact:attention=ring:ulysses=2",
            Plan(patch=4, strategy=ExactPatch(attention="ring", ulysses=2)),
        ),
        ("strategy=structure:native=512,seed=3", Plan(strategy=StructureGuidance(native=512, seed=3))),
    ],
)
def test_options_follow_their_strategy_wherever_it_stands(text: str, plan: Plan | None) -> None:
    wanted = plan or Plan(patch=2, cfg=2, split="rows", strategy=DisplacedPatch(warmup_steps=2))
    assert Plan.parse(text) == wanted
    assert plan_of(text, None, "auto") == wanted


def test_no_option_has_the_name_of_a_field_of_plans() -> None:
    """Else a text could be read in two ways."""
    taken = {field.name for field in fields(Plan)}
    assert not {option.name for kind in known().values() for option in fields(kind)} & taken


def test_a_strategy_is_the_same_by_name_and_as_an_object() -> None:
    assert Plan(patch=2, strategy="fresh-edges:bits=4") == Plan(patch=2, strategy=FreshEdges(bits=4))
    assert Plan().strategy == ExactPatch()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("patch=2,bits=4", "unknown axis 'bits'.*options of a strategy come after it"),
        ("bits=4,strategy=fresh-edges", "unknown axis 'bits'"),
        ("patch=2,patch=4", "has patch twice"),
        ("patch=2,strategy=exact,strategy=displaced", "has strategy twice"),
        ("patch=2,strategy=fresh-edges:bits=4,bits=8", "'fresh-edges' has bits twice"),
        ("patch=2,strategy=", "unknown strategy ''"),
        ("patch=2,strategy=displaced,bits=4", "'displaced' does not know 'bits=4': its options are"),
        ("patch=2,strategy=fresh-edges,pooled", "'fresh-edges' does not know 'pooled'"),
        ("patch", "'patch'.*axis=degree"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.parse(text)


@pytest.mark.parametrize("text", ["strategy=displaced", "cfg=2,strategy=fresh-edges:bits=4", "stage=2,strategy=pcpp"])
def test_a_strategy_without_patches_is_refused_where_a_pipeline_is_asked_for_it(text: str) -> None:
    """Nothing would be stale. In a plan by itself it stays possible: a job that has lost ranks goes on with one."""
    assert Plan.parse(text).patch == 1
    with pytest.raises(PlanError, match="with patch=1 are one: use patch=2 or more, or leave the strategy out"):
        plan_asked_for(text)
    assert plan_asked_for(f"patch=2,{text}") == Plan.parse(f"patch=2,{text}")
    assert plan_asked_for("strategy=structure") == Plan(strategy="structure")


def test_two_strategies_are_one_too_many() -> None:
    with pytest.raises(PlanError, match="has a strategy, and strategy=displaced is another"):
        plan_of("patch=2,strategy=fresh-edges", "displaced", "auto")


@pytest.mark.parametrize(
    "text",
    [
        "fresh-edges:extrapolated=maybe",
        *(f"structure:{option}=maybe" for option in ("align_samples", "masked", "renoised")),
        *(f"structure:seed={value}" for value in ("many", "1.5", "-1")),
    ],
)
def test_what_is_no_value_of_an_option_is_refused(text: str) -> None:
    option = text.partition(":")[2].partition("=")[0]
    with pytest.raises(PlanError, match=f"{option}="):
        parse_strategy(text)
