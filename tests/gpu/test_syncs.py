"""Between the first and the last step a rank on a GPU does not wait for it."""

from __future__ import annotations

import pytest

from benchmarks.gpu.denoisers import Denoiser
from benchmarks.gpu.strategies import CFG, FakeRank
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
