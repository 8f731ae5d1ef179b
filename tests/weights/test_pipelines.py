"""Pipelines with weights=sharded generate, bit for bit, what the same plan does with whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diffusers.hooks import FirstBlockCacheConfig

from patchpar.errors import WorkerDied
from patchpar.shard.weights.sharded import SLOTS
from tests.breadth import first_of

CASES = [
    ("flux", "patch=2"),
    ("sdxl", "patch=3"),
    ("sd3", "cfg=2,patch=2"),
    ("wan", "cfg=2,patch=2"),
    ("wan", "cfg=2"),
    ("sdxl", "cfg=2"),
    ("wan", "cfg=2,patch=2,strategy=displaced:warmup_steps=1"),
    ("flux", "patch=2,strategy=fresh-edges:warmup_steps=1"),
    ("flux", "patch=2,strategy=pcpp:warmup_steps=1"),
    ("sdxl", "patch=2,strategy=pcpp:warmup_steps=1"),
    ("wan", "cfg=2,patch=2,strategy=pcpp:warmup_steps=1"),
]
CACHED = [
    ("flux", "patch=2", FirstBlockCacheConfig(threshold=0.343)),
    ("wan", "cfg=2", FirstBlockCacheConfig(threshold=0.2)),
    ("wan", "cfg=2,patch=2", FirstBlockCacheConfig(threshold=0.2)),
]


@pytest.mark.parametrize(("name", "plan"), first_of(CASES, ("wan", "cfg=2")))
def test_same_latents_as_whole_weights(ranks: Any, name: str, plan: str) -> None:
    found = [each for each in ranks.run("tests.weights.pipelines:both", 4, name, plan) if each]
    assert found[0]["equal"] == [True, True]
    for each in found:
        assert each["restored"]
        assert len(each["blocks"]) >= 2, "a denoiser and a text encoder"
        more_than_slots = any(count > SLOTS for _, count in each["blocks"].values())
        assert ("weights" in each["sent"]) == more_than_slots, "two blocks stay in their slots"
        assert "weights" not in each["whole sent"]


@pytest.mark.parametrize(("name", "plan", "cache"), first_of(CACHED))
def test_step_caches(ranks: Any, name: str, plan: str, cache: Any) -> None:
    """Guidance ranks with calls of their own decide for themselves which blocks to compute."""
    found = [each for each in ranks.run("tests.weights.pipelines:both", 4, name, plan, cache) if each]
    assert found[0]["equal"] == [True, True]
    assert all(each["restored"] for each in found)


@pytest.mark.breadth
def test_plans_of_the_same_ranks_take_over_what_is_divided(ranks: Any) -> None:
    """As guided and unguided calls with plan="auto"; nothing is made whole, for which there would be no room."""
    found = ranks.run("tests.weights.pipelines:in_turn", 4, "wan", ["cfg=2", "patch=2", "cfg=2"])[:2]
    assert found[0]["equal"] == [True] * 6
    for each in found:
        assert len(each["made"]) == len(set(each["made"])) >= 2, "each network once"
        assert each["restored"]


@pytest.mark.breadth
def test_adapters_come_and_go_beside_sharded_weights(ranks: Any, tmp_path: Path) -> None:
    first, second, *_ = ranks.run("tests.weights.pipelines:adapted", 4, "patch=2", str(tmp_path))
    assert first["equal"] == [True] * 10
    assert first["differ"] == [False, True, True, True, False]
    assert first["held"] == second["held"] == [3] * 4, "a transformer and two text encoders stay sharded"


@pytest.mark.breadth
@pytest.mark.parametrize("weights", ["sharded", "hosted"])
@pytest.mark.parametrize("kind", ["pissa", "olora", "dora"])
def test_adapters_that_read_the_weights_beside_them(ranks: Any, tmp_path: Path, kind: str, weights: str) -> None:
    """When they are loaded (PiSSA, OLoRA: weights are whole meanwhile), or in every call (DoRA)."""
    first, second, *_ = ranks.run("tests.weights.pipelines:initialised", 4, weights, str(tmp_path), kind)
    assert first["equal"] == [True] * 4
    assert first["differ"]
    assert first["held"] == second["held"] == 3, "a transformer and two text encoders are divided again"


@pytest.mark.breadth
@pytest.mark.parametrize("is_called", first_of([True, False], True))
def test_adapters_whose_weights_do_not_fit_are_refused_by_name(ranks: Any, tmp_path: Path, is_called: bool) -> None:
    of_ranks = ranks.run("tests.weights.pipelines:refused_adapter", 4, str(tmp_path), is_called)[:2]
    assert of_ranks[0]["equal"] == [True] * (4 if is_called else 2)  # only the first rank has latents
    for found in of_ranks:
        assert "load_lora_weights() initialises an adapter from the weights beside it" in found["message"]
        assert "init_lora_weights='pissa'" in found["message"]
        assert "or load a plain LoRA" in found["message"]


def test_a_method_that_replaces_sharded_weights_is_noticed(ranks: Any) -> None:
    for message in ranks.run("tests.weights.pipelines:replaced", 4)[:2]:
        assert "has replaced weights of transformer_blocks.0 of SD3Transformer2DModel" in message
        assert "or use weights=whole" in message


@pytest.mark.parametrize("case", ["together", "first call", "one rank"])
def test_a_refusal_leaves_every_pipeline_as_it_was(ranks: Any, case: str) -> None:
    """On all ranks: none goes on, and waits for one that has refused."""
    for rank, found in enumerate(ranks.run("tests.weights.pipelines:refused_midway", 4, case)):
        if case == "one rank":
            why = "UnsupportedModel: no blocks" if rank == 1 else "UnsupportedModel: another rank cannot divide"
        else:
            why = "PlanError: weights=hosted keeps"
        assert found["message"].startswith(why)
        assert found["whole"]
        assert found["held next"] == 3


@pytest.mark.breadth  # as test_loading holds it of a pipeline that is adopted, on threads
@pytest.mark.parametrize("case", ["adopted", "first call"])
def test_a_rank_without_memory_for_its_shards_tells_the_others(ranks: Any, case: str) -> None:
    """Also where blocks move in the first call."""
    found = ranks.run("tests.weights.pipelines:failed_midway", 4, case)
    assert found.pop(1) == ("OutOfMemoryError: no memory for block 0", True)
    assert found == [("ExchangeError: another rank has failed while its blocks moved into shards", True)] * 3


def test_weights_stay_in_host_memory_where_features_cannot_be_divided(ranks: Any) -> None:
    for found in ranks.run("tests.weights.pipelines:undivided_features", 4)[:2]:
        assert found["message"] == "UnsupportedModel: no features", "not that whole weights do not fit"
        assert found["next"]
        assert found["restored"]


@pytest.mark.breadth
def test_a_rank_killed_in_a_gather(ranks: Any) -> None:
    with pytest.raises(WorkerDied, match=r"rank 1 .*SIGKILL.*last exchange point 'weights of "):
        ranks.run("tests.weights.pipelines:killed", 4)
    for found in ranks.run("tests.weights.on_ranks:after_an_exception", 2):  # on other workers
        assert all(found)


COMPILED = [  # of small networks in every run, see test_sharded
    ("flux", "patch=2", "sharded", "eager"),
    ("flux", "patch=2", "sharded", "inductor"),
    ("wan", "cfg=2", "sharded", "eager"),
    ("flux", "patch=2", "hosted", "eager"),
    ("flux", "patch=1", "hosted", "eager"),
]


@pytest.mark.breadth
@pytest.mark.parametrize(("name", "plan", "kind", "backend"), COMPILED)
def test_compiled_blocks(ranks: Any, name: str, plan: str, kind: str, backend: str) -> None:
    """Their graphs are those of blocks with whole weights, and gathers are not in them."""
    found = [each for each in ranks.run("tests.weights.pipelines:compiled", 4, name, plan, kind, backend) if each]
    assert found[0]["equal"] == [True, True]
    for each in found:
        assert each["graphs"][0] == each["graphs"][1] > 0
        is_moved = {"sharded": "weights", "hosted": "host"}[kind] in each["kinds"]
        assert is_moved == (each["most blocks"] > SLOTS), "two blocks stay in their slots"
        assert each["restored"]
