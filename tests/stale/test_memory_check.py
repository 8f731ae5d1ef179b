"""Memory of stale keys and values is known before the first of them is stored, and refused where there is less."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from patchpar.comm.exchange_part import ExchangePart
from patchpar.plan.bands import Bands
from patchpar.plan.kv_selection import TokensAcross
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.attention.late_tokens import LateTokens
from patchpar.shard.attention.stale_kv import RemoteTokens
from patchpar.shard.attention.stale_partials import KeysValues
from patchpar.shard.stale.cache import StaleBytes
from patchpar.shard.stale.send_window import NUM_BUFFERS
from patchpar.shard.stale.stale_layout import StaleLayout, expected_bytes
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.stale.workspace import Workspace
from patchpar.strategies import parse_strategy
from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.conformance.test_strategies import ThreadRank

from .on_ranks import evaluate, patched
from .runs import Run, sites_of

ON_RANKS = "tests.stale.on_ranks"
STRATEGIES = (
    "fresh-edges",
    "fresh-edges:correction=none,extrapolated=false",
    "fresh-edges:correction=none,extrapolated=false,bits=8",
    "fresh-edges:correction=linear",
    "fresh-edges:context=pooled,pool=2",
    "fresh-edges:context=pooled,pool=2,bits=4",
    "fresh-edges:bits=8",
    "displaced",
    "displaced:preset=paper",
    "pcpp",
    "pcpp:context=paper",
)


def num_bytes(tensors: Any) -> int:
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_layer_stores_what_its_layout_says(strategy: str, rank: int, dtype: torch.dtype) -> None:
    """Of three ranks with bands of 5, 5 and 4 rows, beside two tokens of text."""
    policy = parse_strategy(strategy).policy
    axis, grid = Axis("patch", rank, 3, (0, 1, 2)), LevelGrid(Bands((0, 5, 10, 14)), TokensAcross(8), -2)
    joins = policy.published or policy.context.narrow_to is not None
    layout = StaleLayout(policy.context, axis, grid, (2, 2, 3, 8), dtype.itemsize, common=2, joins=joins)
    here = KeysValues(*torch.randn(2, 2, grid.num_tokens(rank) + 2, 3, 8).to(dtype))
    state = RemoteTokens(layout, here.k_BlND, Workspace())
    state.remember(state.write_fresh(here), torch.ones(()), continues=False)
    assert StaleBytes(num_bytes(state.tensors()), num_bytes(state.arriving())) == layout.num_bytes
    part = state.part(state.write(here))
    assert isinstance(part, ExchangePart)
    assert part.bytes_sent > 0


LATE = ("fresh-edges", "fresh-edges:extrapolated=false", "fresh-edges:correction=none", "fresh-edges:correction=linear")


@pytest.mark.parametrize("strategy", LATE)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_layer_that_sends_late_stores_what_its_layout_says(strategy: str, rank: int) -> None:
    """Its own tokens; what it receives into belongs to the window."""
    axis, grid = Axis("patch", rank, 3, (0, 1, 2)), LevelGrid(Bands((0, 5, 10, 14)), TokensAcross(8), -2)
    context = parse_strategy(strategy).policy.context
    early = StaleLayout(context, axis, grid, (2, 2, 3, 8), 4, common=2)
    layout = replace(early, may_wait=True)
    here = KeysValues(*torch.randn(2, 2, grid.num_tokens(rank) + 2, 3, 8))
    state, buffers = LateTokens(layout, here.k_BlND, Workspace()), [Workspace() for _ in range(NUM_BUFFERS)]
    state.remember(state.write_fresh(here), torch.ones(()), continues=False)
    for index in range(2 * NUM_BUFFERS):
        state.receive_into(buffers[index % NUM_BUFFERS], torch.ones(()))
    assert StaleBytes(num_bytes(state.tensors()), num_bytes(state.arriving())) == layout.num_bytes
    assert num_bytes(x for buffer in buffers for x in buffer.tensors()) == layout.window_bytes
    assert expected_bytes(layout, 50).total < 0.6 * expected_bytes(early, 50).total


EARLY = ("pcpp", "displaced:preset=paper", "fresh-edges:context=pooled", "fresh-edges:bits=8")


@pytest.mark.parametrize("strategy", EARLY)
def test_what_is_small_or_read_where_it_arrives_is_not_sent_late(strategy: str) -> None:
    axis, grid = Axis("patch", 0, 2, (0, 1)), LevelGrid(Bands((0, 4, 8)), TokensAcross(8), -2)
    policy = parse_strategy(strategy).policy
    layout = StaleLayout(policy.context, axis, grid, (2, 2, 3, 8), 4, joins=policy.published, may_wait=True)
    assert not layout.is_late
    assert layout.window_bytes == 0


@pytest.mark.parametrize("strategy", first_of(STRATEGIES[:5], "fresh-edges:context=pooled,pool=2"))
def test_a_call_is_estimated_from_its_first_layer(ranks: Any, strategy: str) -> None:
    """Seven layers of three sizes: to the byte but for averages, means, biases and scales, of which some have more."""
    for expected, held in ranks.run(f"{ON_RANKS}:expected_and_held", 2, Run(strategy=strategy, size=(24, 8))):
        assert sum(expected) == pytest.approx(sum(held), rel=0.15)
        if "false" in strategy and "bits" not in strategy:
            assert tuple(expected) == tuple(held)


PARTIALS = "fresh-edges:context=partials,refresh=2"


def test_cached_attention_is_estimated_from_its_first_layer(ranks: Any) -> None:
    """Seven layers of three sizes, of which about half receive keys in a step: the layers in turn, not by size."""
    for expected, held in ranks.run(f"{ON_RANKS}:expected_and_held", 2, Run(strategy=PARTIALS, size=(24, 8))):
        assert sum(expected) == pytest.approx(sum(held), rel=0.15), (expected, held)


MESSAGES = (
    "fresh-edges:bits=8",
    "fresh-edges:bits=4,correction=none",
    "fresh-edges:context=pooled,pool=2",
    "fresh-edges:context=pooled,pool=2,bits=4",
)


@pytest.mark.parametrize("strategy", first_of(MESSAGES, "fresh-edges:context=pooled,pool=2,bits=4"))
def test_between_gpus_layouts_say_what_buffers_of_messages_take(strategy: str) -> None:
    """What is sent and received for the next step has memory of its own in every step, as graphs need it."""
    run, stand_in, world = Run(strategy=strategy, size=(24, 8)), StandIn(3), 3
    sites_of("sd")

    def expected_and_held(transport: Any) -> tuple[int, int]:
        clock = StepClock()
        bands = patched(ThreadRank(transport, world), run, clock)  # type: ignore[arg-type]
        for evaluation in range(run.evaluations):
            evaluate(bands, clock, run, evaluation)
        bands.finish()
        assert bands.history is not None
        cache = bands.history.cache
        layouts = [entry.state.layout for call in cache._calls.values() for entry in call.entries.values()]
        tokens = sum(layout.num_bytes.total + layout.message_bytes for layout in layouts)
        shared = max(each.workspace_bytes for each in layouts) + max(each.fit_bytes for each in layouts)
        return tokens + shared, cache.num_bytes().total

    for found in stand_in.run(expected_and_held):
        assert isinstance(found, tuple), found
        assert found[0] == found[1]


def test_too_little_memory_is_refused_with_figures(ranks: Any) -> None:
    run = Run(strategy="fresh-edges", size=(24, 8))
    for message in ranks.run(f"{ON_RANKS}:refused", 2, run, 10_000):
        assert re.match(
            r"strategy fresh-edges keeps 383\.3 KiB of keys and values for the next step on each rank, and receives "
            r"222\.0 KiB more, but only 9\.8 KiB for 2 CPU ranks are free: use strategy exact",
            message,
        )
    assert ranks.run(f"{ON_RANKS}:refused", 2, run, 10**9) == ["nothing"] * 2
    for message in ranks.run(f"{ON_RANKS}:refused", 2, replace(run, strategy=PARTIALS), 10_000):
        assert re.match(
            r"strategy fresh-edges keeps [\d.]+ KiB of attention to others' tokens for the next step on each rank, and "
            r"receives [\d.]+ KiB more, but only 9\.8 KiB for 2 CPU ranks are free: use strategy exact",
            message,
        )
