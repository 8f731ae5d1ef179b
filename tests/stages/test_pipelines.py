"""Pipelines in stages generate, bit for bit, what plain diffusers does, or the same plan without stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patchpar import Plan
from patchpar.errors import WorkerDied
from tests.breadth import first_of

CASES = [
    ("flux", "stage=2", ""),
    ("flux", "stage=3", ""),
    ("sd3", "cfg=2,stage=2", "cfg=2"),
    ("wan", "cfg=2,stage=2", ""),
    ("sdxl", "cfg=2,stage=2", "cfg=2"),
    ("qwen", "stage=2", ""),
    ("deep lumina2", "stage=2", ""),  # the two prompts have other lengths, which a mask says
]


@pytest.mark.parametrize(("name", "plan", "without"), first_of(CASES, ("flux", "stage=2", "")))
def test_same_latents_as_without_stages(ranks: Any, tmp_path: Path, name: str, plan: str, without: str) -> None:
    found = ranks.run("tests.stages.pipelines:in_stages", 4, name, plan, without, str(tmp_path))
    assert found[0] is not None
    assert found[0]["equal"] == [True, True]
    took_part = [each for each in found if each is not None]
    assert len(took_part) == Plan.parse(plan).world_size
    assert all(each["restored"] for each in took_part)
    assert all(each["sent"].get("stage") or each["sent"].get("prediction") for each in took_part)


def test_decoded_images_are_those_of_one_device_where_one_rank_decodes(ranks: Any) -> None:
    """In bands they differ by rounding."""
    in_bands, by_one = (ranks.run("tests.stages.pipelines:decoded", 4, vae)[0] for vae in ("auto", "rank0"))
    assert 0 < in_bands < 1e-4
    assert by_one == 0


@pytest.mark.parametrize("plan", first_of(["stage=2", "stage=2,weights=hosted"], "stage=2"))
def test_blocks_that_a_controlnet_borrows_stay_on_every_stage(ranks: Any, tmp_path: Path, plan: str) -> None:
    found = ranks.run("tests.stages.pipelines:beside_a_borrower", 4, plan, str(tmp_path))
    assert found[0]["equal"] == [True, True]
    assert all(each["restored"] for each in found[:2])


def test_more_stages_than_blocks_are_refused(ranks: Any) -> None:
    messages = ranks.run("tests.stages.pipelines:refused", 4, "sd3", "stage=4")
    assert all("blocks one after the other: use stage=" in message for message in messages)


@pytest.mark.breadth
def test_a_stage_that_is_killed(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"rank 0 .*SIGKILL.*last exchange point 'output of a block'"):
        ranks.run("tests.stages.pipelines:killed", 4)
    for found in ranks.run("tests.stages.on_ranks:two_forms", 2):  # on other workers
        assert found == [True] * 5
