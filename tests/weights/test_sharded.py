"""Sharded weights give the bits of whole ones, whatever the blocks, and leave every bit as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.shard.weights.packed import resident_of
from tests.breadth import first_of
from tests.exact import denoisers
from tests.tiny.transformers import TRANSFORMERS
from tests.weights.networks import NETWORKS
from tests.weights.quantised import LINEARS

ON_RANKS = "tests.weights.on_ranks"
KINDS = ("sharded", "sharded apart")
"""The other: of ranks that cannot map each other's memory."""


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("world", "slots", "resident", "kind"),
    [(2, 2, 0, "sharded"), (3, 3, 0, "sharded apart"), (3, 1, 1, "sharded apart"), (3, 2, 1, "sharded")],
)
def test_same_bits_as_whole_weights(ranks: Any, name: str, world: int, slots: int, resident: int, kind: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:networks_with", world, name, slots, resident, kind):
        assert found["equal"] == [True] * 4
        assert found["restored"]
        outside = ["blocks.1", "blocks.4"] if name == "read outside" else []
        assert found["outside"] == outside


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_those_of_the_shards(ranks: Any, world: int, kind: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:bytes_of", world, kind):
        gathered = 2 * sum(found["shards"]) * (world - 1)
        assert found["sent"] == found["received"] == {"weights": gathered}
        assert found["rounds"] == {"weights": 2 * 4}
        assert not found["copied"], "the others read shards where they lie"
        assert found["messages"] == (0 if kind == "sharded" else 2 * 4), "who has mapped all shards needs none"
        padding = 4 * 64 * world
        assert found["held"] <= found["whole"] / world + 2 * max(found["shards"]) * world + padding


@pytest.mark.parametrize(
    "name", first_of([*TRANSFORMERS, *denoisers.KINDS], "FluxTransformer2DModel", "WanTransformer3DModel", "sdxl")
)
def test_networks_of_diffusers(ranks: Any, name: str) -> None:
    for kind in KINDS:
        for found in ranks.run(f"{ON_RANKS}:diffusers_network", 3, name, True, torch.float32, kind):
            assert found["equal"] == [True, True]
            assert found["restored"]


def test_what_lies_in_one_shard_is_used_there_and_what_is_written_to_it_is_the_ranks_own(ranks: Any) -> None:
    for rank, found in enumerate(ranks.run(f"{ON_RANKS}:written_outside_slots", 2, "sharded")):
        assert found["in place"] > 0.05
        assert found["other"] == bool(rank)
        assert found["stays"], "in the next call, and when weights are whole again"
    for found in ranks.run(f"{ON_RANKS}:written_outside_slots", 2, "sharded apart"):
        assert (found["in place"], found["other"]) == (0, False)


@pytest.mark.parametrize(
    ("in_memory", "kind", "stays"), [((), "sharded", True), ((1,), "sharded", False), ((), "sharded apart", False)]
)
def test_weights_in_files_stay_there_if_they_are_in_files_on_all_ranks(
    ranks: Any, tmp_path: Path, in_memory: tuple[int, ...], kind: str, stays: bool
) -> None:
    """The system has one copy of a file for all ranks; where one has its weights elsewhere, all divide them."""
    for rank, found in enumerate(ranks.run(f"{ON_RANKS}:weights_in_files", 3, str(tmp_path), in_memory, kind)):
        assert found["equal"] == [True, True]
        assert found["restored"]
        assert found["changed"] == (kind == "sharded"), "what a rank writes to mapped weights stays"
        assert found["in file"] == found["after"] == stays, rank
        assert (found["held"] == 0) == stays
        assert found["sent"]["weights"] > 0, "counted as anywhere"


def test_a_call_after_one_that_failed_gathers_each_block_once(ranks: Any) -> None:
    for usual, after in ranks.run(f"{ON_RANKS}:gathers_after_an_exception", 2):
        assert after == usual == 5


def test_slots_are_free_when_weights_are_whole(ranks: Any) -> None:
    assert ranks.run(f"{ON_RANKS}:slots_after_the_end", 1) == [True]


@pytest.mark.parametrize("kind", first_of(["sharded", "hosted"], "sharded"))
@pytest.mark.parametrize("form", LINEARS)
def test_quantised_weights(ranks: Any, form: str, kind: str) -> None:
    """In the forms that torchao, GGUF and bitsandbytes use: codes are in shards."""
    for found in ranks.run(f"{ON_RANKS}:with_quantised_weights", 3, form, kind):
        assert found["equal"] == [True] * 3
        assert not found["alone"], "the control: without gathers the output is another"
        assert found["restored"]
        assert found["codes"] == 5


def test_networks_in_half_precision(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:diffusers_network", 2, "FluxTransformer2DModel", True, torch.bfloat16):
        assert found["equal"] == [True, True]


def test_without_the_gathers_it_is_wrong(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:diffusers_network", 2, "FluxTransformer2DModel", False, torch.float32):
        assert found["equal"] == [False, False]


@pytest.mark.parametrize("case", ["cast_by_layer", "after_an_exception"])
def test_parameters_with_other_memory_and_interrupted_calls(ranks: Any, case: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:{case}", 2):
        assert all(found)


@pytest.mark.parametrize("kind", first_of(["sharded", "hosted"], "sharded"))
def test_compiled_blocks_keep_their_graphs(ranks: Any, kind: str) -> None:
    """Gathers are outside of the graphs, so that no further one is made."""
    for found in ranks.run(f"{ON_RANKS}:compiled_blocks", 2, kind):
        assert found["equal"] == [True] * 4
        assert found["made"] > found["more"] == 0
        assert found["restored"]


def test_by_one_operation_as_on_gpus(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:by_one_operation", 4, through="torch"):
        assert all(found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("nothing", "not refused"),
        ("compiled", "compiled modules (Chain)"),
        ("offloaded", "weights on meta"),
        ("no blocks", "no list of blocks"),
        ("hidden", "no list of blocks with weights of their own"),
        ("different", "the ranks hold different weights of Chain"),
    ],
)
def test_what_cannot_be_sharded_is_refused_on_every_rank(ranks: Any, change: str, says: str) -> None:
    for message in ranks.run(f"{ON_RANKS}:refused", 2, change):
        assert says in message


def test_one_rank_is_refused(ranks: Any) -> None:
    (message,) = ranks.run(f"{ON_RANKS}:refused", 1, "nothing")
    assert "at least 2 ranks, but the plan has 1" in message


def test_resident_blocks_are_evenly_spaced() -> None:
    assert resident_of(8, 0) == set()
    assert resident_of(8, 2) == {2, 6}
    assert resident_of(5, 9) == {0, 1, 2, 3, 4}
