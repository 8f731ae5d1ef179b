"""Pipelines with tensor=N generate what one process does, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patchpar import Plan
from patchpar.errors import PlanError
from tests.breadth import first_of

CASES = [
    ("flux", "tensor=2", False),
    ("flux", "tensor=2", True),
    ("sd3", "cfg=2,tensor=2", False),
    ("wan", "patch=2,tensor=2", False),
    ("qwen", "tensor=3", False),
]


@pytest.mark.parametrize(("name", "plan", "lora"), first_of(CASES, CASES[1]))
def test_same_latents_as_one_process(ranks: Any, tmp_path: Path, name: str, plan: str, lora: bool) -> None:
    every = ranks.run("tests.features.pipelines:against_one_process", 4, name, plan, str(tmp_path), lora)
    found = [each for each in every if each]
    assert len(found) == Plan.parse(plan).world_size
    assert found[0]["error"] < 1e-4
    assert found[0]["alone"] > 1e-3, "the control: without sums the image is another"
    for each in found:
        assert each["part"] < 1
        assert each["sent"]["tensor"] > 0
        assert each["restored"], "every bit"


def test_a_plan_has_a_degree_of_features() -> None:
    plan = Plan.parse("patch=2,tensor=3")
    assert plan == Plan(patch=2, tensor=3)
    assert (plan.world_size, str(plan)) == (6, "patch=2,tensor=3,strategy=exact")


def test_sharding_what_is_divided_is_refused() -> None:
    with pytest.raises(PlanError, match="tensor=2 has divided: use weights=whole, or patch=4"):
        Plan(patch=2, tensor=2, weights="sharded")
