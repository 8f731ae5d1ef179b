"""Stages that take their blocks from host memory: no device ever holds the whole network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.errors import PlanError
from patchpar.models.dry_run.plan_memory import memory_of, network_bytes
from patchpar.pipeline import installed_weights
from patchpar.plan.plan import Plan
from tests.breadth import first_of
from tests.stages.pipelines import deep
from tests.tokens.piped import shared

CASES = [
    ("flux", "stage=2"),
    ("sdxl", "stage=2"),
    ("wan", "cfg=2,stage=2"),
    ("sd3", "stage=2,patch=2"),
    ("flux", "stage=2,strategy=piped:pieces=2"),
    ("flux", "stage=2,patch=2,strategy=fresh-edges"),
]


@pytest.mark.parametrize(("name", "plan"), first_of(CASES, CASES[0]))
def test_same_latents_as_whole_weights(tmp_path: Path, name: str, plan: str) -> None:
    wanted = shared(name, plan, tmp_path / "whole")[0]
    for found in shared(name, f"{plan},weights=hosted", tmp_path / "hosted"):
        assert torch.equal(found, wanted)


@pytest.mark.breadth
def test_a_device_has_its_own_blocks_and_slots_at_most(ranks: Any) -> None:
    """From loading on, in the first call too, in which the whole network runs; and after a method between calls."""
    plan, networks = Plan(stage=2, weights="hosted"), network_bytes(deep("flux")[0])
    of_denoiser = {name: each for name, each in networks.items() if name == "transformer"}
    limit = memory_of(plan, of_denoiser).ranks[0]
    of_ranks = ranks.run("tests.stages.pipelines:hosted", 4, str(plan))[:2]
    assert of_ranks[0]["equal"] == [True] * 4  # only the first rank has latents
    for found in of_ranks:
        assert found["most"] <= limit * 1.05 < found["whole"], "alignment of each tensor"
        assert found["held"] < found["whole"] / 2 + found["slots"]
        assert found["restored"]


def test_ranks_that_cannot_map_the_memory_of_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_weights, "all_can_map", lambda mesh: False)
    with pytest.raises(PlanError, match=r"not every rank can map .*patch=N,weights=sharded"):
        shared("flux", "stage=2,weights=hosted", tmp_path)
