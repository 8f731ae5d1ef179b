"""A rank that stops at an exchange frees all others: each rank of three to five, at each exchange of every strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.torch_p2p import TorchTransport
from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.conformance.test_strategies import (
    EXACT_AT_FIRST,
    STRATEGIES,
    WORLDS,
    frees_every_rank,
    predicted,
    run_of,
)
from tests.conformance.test_transformers import FLUX, case_of
from tests.exact import denoisers
from tests.stale.runs import sites_of
from tests.tokens.past import on_rank_of

ONE_LEVEL = {
    "down_block_types": ("CrossAttnDownBlock2D",),
    "mid_block_type": None,
    "up_block_types": ("UpBlock2D",),
    "block_out_channels": (16,),
}
CASES = [(strategy, world) for strategy in STRATEGIES for world in WORLDS.get(strategy, (2, 3, 4, 5))]
Call = Callable[[TorchTransport], Any]


@pytest.fixture(scope="module", autouse=True)
def one_level() -> Iterator[None]:
    """A denoiser with few exchanges, of every kind."""
    kind = denoisers.Kind(build=denoisers._sd(**ONE_LEVEL), arguments=denoisers._text, odd=True)
    with mock.patch.dict(denoisers.KINDS, one_level=kind):
        sites_of("one_level")
        yield


def call_of(strategy: str, world: int) -> Call:
    """An exact step, and a stale one where there are such, of uneven bands."""
    evaluations = 2 if strategy.startswith(EXACT_AT_FIRST) else 1
    run = replace(run_of(strategy), denoiser="one_level", size=(11, 4), evaluations=evaluations)
    return lambda transport: predicted(transport, run, world, images=1)


def exchanges_of(call: Call, world: int) -> Counter[int]:
    """How many exchanges each rank makes in a call."""
    start, made = Communicator._start, Counter[int]()

    def noted(comm: Communicator, *exchange: Any) -> Any:
        made[comm.transport.rank] += 1
        return start(comm, *exchange)

    with mock.patch.object(Communicator, "_start", noted):
        found = StandIn(world).run(call)
    assert not [each for each in found if isinstance(each, BaseException)]
    return made


@pytest.mark.parametrize(("strategy", "world"), first_of(CASES, ("exact", 3)))
def test_each_rank_frees_the_others_at_each_exchange(strategy: str, world: int) -> None:
    call = call_of(strategy, world)
    made = exchanges_of(call, world)
    assert len(made) == world
    for rank, count in made.items():
        for number in range(count):
            frees_every_rank(call, world, number, rank)


@pytest.mark.parametrize(("strategy", "world"), [("fresh-edges", 3), ("exact", 5)])
def test_at_each_exchange_one_of_the_ranks_in_turn_frees_the_others(strategy: str, world: int) -> None:
    """As above, of more ranks or with a stale step, by fewer runs."""
    call = call_of(strategy, world)
    made = exchanges_of(call, world)
    for number in range(min(made.values())):
        frees_every_rank(call, world, number, number % world)


@pytest.mark.breadth
@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_at_each_exchange_of_tokens_each_rank_frees_the_others(strategy: str, world: int) -> None:
    call = on_rank_of(case_of(FLUX, strategy, world))
    fewest = min(exchanges_of(call, world).values())
    for number, rank in product(range(fewest), range(world)):
        frees_every_rank(call, world, number, rank)


def test_a_rank_that_goes_on_alone_would_be_seen() -> None:
    """Control: where no rank stops, none is freed."""
    call = call_of("exact", 3)
    with pytest.raises(AssertionError):
        frees_every_rank(call, 3, number=10_000)
