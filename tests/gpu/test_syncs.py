"""Between the first and the last step a rank on a GPU does not wait for it, or where a rule asks for values, once."""

from __future__ import annotations

import pytest

from benchmarks.gpu.denoisers import SHORT, Denoiser, sdxl
from benchmarks.gpu.strategies import CFG, FakeRank, Steps, fake_rank
from tests.breadth import first_of
from tests.gpu.short_models import LAYERS

STRATEGIES = (
    "exact",
    "displaced",
    "displaced:preset=paper",
    "pcpp",
    "pcpp:context=paper",
    "fresh-edges",
    "fresh-edges:bits=8",
    "fresh-edges:correction=linear",
    "fresh-edges:context=pooled,bits=4",
    "fresh-edges:context=partials,refresh=2",
    CFG,
)


def steps_of(strategy: str) -> Steps:
    with fake_rank(1, 2) as rank:
        return rank.steps(sdxl(256, layers=SHORT["sdxl"]), strategy)


@pytest.mark.parametrize(
    ("model", "strategy"),
    first_of([(model, strategy) for model in LAYERS for strategy in STRATEGIES], ("flux", "fresh-edges:bits=8")),
)
def test_no_step_after_the_first_waits_for_the_device(
    rank: FakeRank, models: dict[str, Denoiser], model: str, strategy: str
) -> None:
    """Neither those in which values of the past are not all known yet, nor those that are like all later ones."""
    found = rank.steps(models[model], strategy, {f"step {number}": number for number in range(1, 6)})
    assert {step: dict(counts.syncs) for step, counts in found.items() if counts.syncs} == {}
    assert len(found) == 5


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
