"""Every strategy keeps NCCL's rules over the tokens of a transformer, too: two to five ranks, uneven shares, faults."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.conformance.test_strategies import (
    EXACT_AT_FIRST,
    STRATEGIES,
    WORLDS,
    assert_same,
    at_once,
    frees_every_rank,
    sent_late,
)
from tests.tokens.past import Case, on_rank_of, on_ranks

FLUX, WAN = "FluxTransformer2DModel", "WanTransformer3DModel"
CASES = [(FLUX, strategy, world) for strategy in STRATEGIES for world in WORLDS.get(strategy, (2, 3, 4, 5))]
CASES += [(WAN, strategy, world) for strategy in ("exact", "displaced", "fresh-edges") for world in (2, 3)]
OFTEN = ((FLUX, "exact", 3), (FLUX, "pcpp", 2), (FLUX, "fresh-edges", 3))


def case_of(name: str, strategy: str, world: int) -> Case:
    """Some evaluations, of which the first is exact; most numbers of ranks do not divide the tokens."""
    if not strategy.startswith(EXACT_AT_FIRST):
        return Case(name=name, strategy=strategy, ranks=world, evaluations=1)
    text = strategy + ("," if ":" in strategy else ":") + "warmup_steps=1"
    return Case(name=name, strategy=text, ranks=world, evaluations=4)


@pytest.mark.parametrize(("name", "strategy", "world"), first_of(CASES, *OFTEN))
def test_a_strategy_keeps_the_rules_over_tokens(name: str, strategy: str, world: int) -> None:
    """And predicts what it does on ranks that share memory."""
    case, stand_in = case_of(name, strategy, world), StandIn(world)
    found = stand_in.run(on_rank_of(case))
    assert [each for each in found if isinstance(each, BaseException)] == []
    assert stand_in.faults == []
    with at_once() if "bits=" in strategy else nullcontext(), sent_late(strategy):
        assert_same(found, on_ranks(case))


def test_tokens_are_shared_unevenly() -> None:
    assert len({len(part) for part in case_of(FLUX, "exact", 3).token_parts}) > 1


@pytest.mark.parametrize(("strategy", "world", "number"), [("exact", 3, 1), ("fresh-edges", 2, 9)])
def test_an_exception_at_an_exchange_of_tokens_frees_every_rank(strategy: str, world: int, number: int) -> None:
    frees_every_rank(on_rank_of(case_of(FLUX, strategy, world)), world, number)
