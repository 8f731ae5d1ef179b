"""Pipelines with tensor=N generate what one process does, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patchpar import Plan
from patchpar.errors import PlanError, WorkerDied
from tests.breadth import first_of
from tests.conftest import POOL_SIZE
from tests.tensors import relative
from tests.tokens.changed import Change
from tests.tokens.ip_adapters import images, weights
from tests.tokens.on_ranks import PipelineCase
from tests.tokens.ranks import LIMIT
from tests.tokens.test_ip_adapters import LOAD

CASES = [
    ("flux", "tensor=2", False),
    ("flux", "tensor=2", True),
    ("sd3", "cfg=2,tensor=2", False),
    ("wan", "patch=2,tensor=2", False),
    ("qwen", "tensor=3", False),
    ("flux", "tensor=2,weights=hosted", True),
    ("flux", "tensor=2,weights=hosted,resident=1", False),
    ("wan", "patch=2,tensor=2,weights=sharded", False),
    ("wan", "cfg=2,tensor=2,weights=sharded", False),
    ("sd3", "cfg=2,tensor=2,weights=hosted", False),
]


@pytest.mark.parametrize(("name", "plan", "lora"), first_of(CASES))
def test_same_latents_as_one_process(ranks: Any, tmp_path: Path, name: str, plan: str, lora: bool) -> None:
    every = ranks.run("tests.features.pipelines:against_one_process", 4, name, plan, str(tmp_path), lora)
    found = [each for each in every if each]
    assert len(found) == Plan.parse(plan).world_size
    assert found[0]["error"] < 1e-4
    assert found[0]["alone"] > 1e-3, "the control: without sums the image is another"
    for each in found:
        assert each["part"] < 1
        assert each["sent"]["tensor"] > 0
        assert each["in slots"] == ("weights=" in plan), "each rank's features, in shards of the ranks that hold them"
        assert each["restored"], "every bit"


def test_an_image_that_some_blocks_do_not_look_at(ranks: Any, tmp_path: Path) -> None:
    """What divides the values of an IP-Adapter alone is right where its scale is 0, and wrong in the other blocks."""
    load = Change("load_ip_adapter", (weights("flux"),), LOAD["flux"])
    changes = [load, Change("set_ip_adapter_scale", ([0.0, 0.8],))]
    case = PipelineCase(name="flux", plan="tensor=2", verifications=tmp_path, options=images("flux"))
    for got, want in ranks.run("tests.tokens.changed:generated_between", POOL_SIZE, case, changes)[0]:
        assert relative(got, want) <= LIMIT


@pytest.mark.breadth
def test_a_rank_killed_in_a_sum(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"rank 1 .*SIGKILL.*last exchange point 'sum at "):
        ranks.run("tests.features.pipelines:killed", 4, str(tmp_path))
    for found in ranks.run("tests.features.on_ranks:transformer", 2, "FluxTransformer2DModel"):  # on other workers
        assert max(found["errors"]) <= 1e-5


def test_a_plan_has_a_degree_of_features() -> None:
    plan = Plan.parse("patch=2,tensor=3")
    assert plan == Plan(patch=2, tensor=3)
    assert (plan.world_size, str(plan)) == (6, "patch=2,tensor=3,strategy=exact")


def test_features_on_one_rank_cannot_be_sharded() -> None:
    with pytest.raises(PlanError, match="which is 1 rank: use patch=2 or cfg=2 or more, weights=hosted"):
        Plan(tensor=2, weights="sharded")
