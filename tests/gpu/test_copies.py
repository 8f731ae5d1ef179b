"""What two ranks on GPUs read from them, and copy to them, in a step."""

from __future__ import annotations

import pytest

from benchmarks.gpu.denoisers import SHORT, sdxl
from benchmarks.gpu.strategies import CFG, Steps, fake_rank
from tests.breadth import first_of


def steps_of(strategy: str) -> Steps:
    with fake_rank(1, 2) as rank:
        return rank.steps(sdxl(256, layers=SHORT["sdxl"]), strategy)


def test_the_guidance_split_copies_nothing_from_the_host() -> None:
    """Step, call and shapes, which each message carries, are filled in on the device."""
    counts = steps_of(CFG)["exact"]
    assert sum(counts.operations.values()) > 0
    assert not counts.syncs
    assert not counts.copies


@pytest.mark.breadth
@pytest.mark.parametrize("rule", first_of(["quality=40", "budget=5"], "budget=5"))
def test_a_rule_for_exact_steps_reads_the_device_once_a_call(rule: str) -> None:
    for counts in steps_of(f"fresh-edges:{rule}").values():
        assert sum(number for copy, number in counts.copies.items() if copy.startswith("cuda to cpu")) == 1
        assert sum(counts.syncs.values()) <= 1
