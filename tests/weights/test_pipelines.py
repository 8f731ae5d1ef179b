"""Pipelines with weights=sharded generate, bit for bit, what the same plan does with whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
]


@pytest.mark.parametrize(("name", "plan"), first_of(CASES, ("flux", "patch=2"), ("wan", "cfg=2")))
def test_same_latents_as_whole_weights(ranks: Any, tmp_path: Path, name: str, plan: str) -> None:
    found = [each for each in ranks.run("tests.weights.pipelines:both", 4, name, plan, str(tmp_path)) if each]
    assert len(found[0]["equal"]) == 2
    assert all(found[0]["equal"])
    for each in found:
        assert each["restored"]
        assert len(each["blocks"]) >= 2, "a denoiser and a text encoder"
        more_than_slots = any(count > SLOTS for _, count in each["blocks"].values())
        assert ("weights" in each["sent"]) == more_than_slots, "two blocks stay in their slots"
        assert "weights" not in each["whole sent"]


def test_compiled_blocks_are_refused(ranks: Any) -> None:
    messages = ranks.run("tests.weights.pipelines:refused", 4, "patch=2,weights=sharded")
    assert all("compiled modules" in message for message in messages[:2])
