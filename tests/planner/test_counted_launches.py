"""Tapes of GPUs launch what one rank of the same network was counted to launch, by another way: docs/figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.forecast.models import Model, flux, sdxl
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.simulate import SimulatedSteps
from patchpar.plan.plan import Plan
from patchpar.plan.replay.price import LAUNCHES
from patchpar.plan.replay.tape import Operator, steps_of

COUNTS = Path(__file__).parents[2] / "docs" / "figures" / "gpu-counts.json"
MODELS = {"FLUX": flux, "SDXL": sdxl}
APART = 0.035
"""FLUX's embeddings of positions and texts are computed before the first block, where only the counts have them."""
CASES = [("FLUX", "exact:attention=ring", "exact"), ("SDXL", "exact", "exact"), ("FLUX", "exact:ulysses=4", "exact")]
CASES += [(name, strategy, "stale") for name in MODELS for strategy in ("displaced", "pcpp", "fresh-edges")]


def counted(model: str, strategy: str, step: str) -> int:
    """Launches of a step, as the page of counts has them."""
    sections = [each for each in json.loads(COUNTS.read_text()) if each["heading"].startswith(model)]
    rows = [row for section in sections for table in section["tables"] for row in table]
    (found,) = (row for row in rows if row["strategy"] == f"`{strategy}`" and row["step"] == step)
    return int(found["launches"].replace(",", ""))


def recorded(make: Model, strategy: str) -> list[Operator]:
    """Kernels of the last step of rank 1 of 4."""
    pipe, call = make()
    pipe.set_progress_bar_config(disable=True)
    simulated = SimulatedSteps.of(Plan.parse(f"patch=4,strategy={strategy}"))
    recording = Recording(pipe, simulated.plan, call, RecordOptions(joined=True).with_steps(simulated.recorded))
    steps = steps_of(recording.of_rank(1).tape)
    last = max((name for name in steps if name.startswith("step")), key=lambda name: int(name.split()[1]))
    return [entry for entry in steps[last] if isinstance(entry, Operator)]


@pytest.mark.breadth
@pytest.mark.parametrize(("model", "strategy", "step"), CASES)
def test_a_tape_launches_what_was_counted(model: str, strategy: str, step: str) -> None:
    """Attention is in the dtype of the model, too."""
    kernels = recorded(MODELS[model], strategy)
    launches = sum(LAUNCHES.get(each.name, 1) for each in kernels)
    assert launches == pytest.approx(counted(model, strategy, step), rel=APART)
    assert "float32" not in {each.dtype for each in kernels if each.name == "attention"}
