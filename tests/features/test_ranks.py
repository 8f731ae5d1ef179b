"""Ranks that hold some features of a transformer compute together what one process does with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.breadth import first_of
from tests.features.test_search import WHOLE
from tests.tiny.transformers import TRANSFORMERS

ON_RANKS = "tests.features.on_ranks"
CASES = [
    *((name, 2) for name in TRANSFORMERS if name not in WHOLE),
    ("FluxTransformer2DModel", 3),
    *((name, 3) for name in ("Krea2Transformer2DModel",) if name in TRANSFORMERS),
    ("LTXVideoTransformer3DModel", 3),
    ("WanTransformer3DModel", 3),
]


@pytest.mark.parametrize(
    ("name", "world"), first_of(CASES, ("FluxTransformer2DModel", 2), ("LTXVideoTransformer3DModel", 3))
)
def test_as_one_process_computes(ranks: Any, name: str, world: int) -> None:
    for found in ranks.run(f"{ON_RANKS}:transformer", world, name):
        assert max(found["errors"]) <= 1e-5
        assert found["alone"] > 1e-3, "the control: without sums the output is another"
        assert found["kinds"] == ["tensor"]
        assert found["part"] < 1
        assert found["restored"], "every bit, and no hook left"


@pytest.mark.parametrize("where", ["one rank", "all ranks"])
def test_a_cut_that_fails_midway_is_undone_on_all_ranks(ranks: Any, where: str) -> None:
    """Those that could cut wait for no one, and the next cut is right."""
    found = ranks.run(f"{ON_RANKS}:failed_midway", 2, where)
    wanted = {
        "one rank": ["UnsupportedModel: another rank cannot divide", "MemoryError: no memory"],
        "all ranks": ["PlanError: no room"] * 2,
    }
    for each, message in zip(found, wanted[where], strict=True):
        assert each["message"].startswith(message)
        assert each["whole"]
        assert each["error"] <= 1e-5


def test_features_become_whole_when_there_is_room_and_not_before(ranks: Any) -> None:
    for each in ranks.run(f"{ON_RANKS}:restored_late", 2):
        assert each["error"] <= 1e-5, "the cut network after the refusal"
        assert each["whole"]


def test_weights_can_be_trained_after_a_cut_in_inference_mode(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:of_inference_mode", 2):
        assert not any(found)


def test_a_cache_that_would_have_keys_of_own_heads_is_refused(ranks: Any, tmp_path: Path) -> None:
    """As FLUX.2 [klein] KV fills in its first step, and reads in the others."""
    for message, whole in ranks.run(f"{ON_RANKS}:filling_a_cache", 2, str(tmp_path)):
        assert message.startswith("UnsupportedModel: Flux2Transformer2DModel writes keys of its own heads to a cache")
        assert "use patch=N" in message
        assert whole


def test_what_was_found_is_kept(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(f"{ON_RANKS}:kept_in_files", 2, str(tmp_path), "WanTransformer3DModel")
    for searched, kept, without_file in found:
        assert searched[0] > kept[0] == 0
        assert without_file[0] == searched[0], "both ranks search, though one has it"
        assert searched[1] == kept[1] < 1e-5
        assert max(each[2] for each in (searched, kept, without_file)) < 1e-5
    assert len({each[3] for of_rank in found for each in of_rank}) == 1


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("through", ["auto", pytest.param("torch", marks=pytest.mark.breadth)])
def test_sums_are_the_same_bits_on_all_ranks(ranks: Any, world: int, through: str) -> None:
    if through == "torch":
        world = 4  # all ranks take part in making groups
    found = ranks.run(f"{ON_RANKS}:sums", world, through == "torch", through=through)
    for number, (total, sent) in enumerate(found[0]):
        terms = [
            torch.randn(total.shape, generator=torch.Generator().manual_seed(rank)).to(total.dtype).double()
            for rank in range(world)
        ]
        limit = {torch.float32: 1e-6, torch.float64: 1e-12}.get(total.dtype, 1e-2)
        torch.testing.assert_close(total.double(), torch.stack(terms).sum(0), rtol=limit, atol=limit)
        assert all(torch.equal(of_rank[number][0], total) for of_rank in found)
        wanted = world - 1 if number < 2 or world == 2 else 2 * (world - 1) / world
        assert sent == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("compiled", "UnsupportedModel: FluxTransformer2DModel has compiled modules"),
        ("quantised", "no Linear has output features that can be divided"),
        ("tied", "weight of a Linear is tied to another module's"),
    ],
)
def test_what_cannot_be_divided_is_refused(ranks: Any, change: str, message: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:refused", 2, change):
        assert message in found
        assert "use patch=N" in found
