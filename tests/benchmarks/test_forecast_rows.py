"""Rows of forecasts beside measurements: which are read, and by which the others are calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.forecast import measured, published
from benchmarks.page import write_page
from patchpar.plan.replay.price import CostAssumptions

PAGE = """# On GPUs

On GPU 0: NVIDIA {name} (UUID: GPU-0).

## A rank's own work

| model | strategy | step | ms |
|---|---|---|---|
| sdxl | plain | eager | 50 |
| sdxl | plain | graph | 40 |
| sdxl | `exact` | exact, graph | 20 |
| flux | plain | graph | 160 |
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Seconds of a call, and of its step."""

    seconds: float

    @property
    def step(self) -> Part:
        return self

    @property
    def phases(self) -> dict[str, Part]:
        return {}


@dataclass(frozen=True, slots=True)
class Priced:
    """A model whose kernels take so long, and whose launches take a tenth of it."""

    kernels: float

    def forecast(self, plan: Any, machine: Any, steps: int, assumed: CostAssumptions) -> Part:
        launching = 0.1 * self.kernels if assumed.launch else 0.0
        return Part(seconds=assumed.scale * self.kernels + launching)


def figures(folder: Path, name: str) -> Path:
    page = folder / "gpu.md"
    write_page(PAGE.format(name=name), page)
    return page.with_suffix(".json")


def test_forwards_of_one_process_are_read_for_a_device_of_the_catalogue(tmp_path: Path) -> None:
    found = measured.measured(figures(tmp_path, "H100 80GB HBM3"))
    assert [(each.model, each.device, each.how, each.seconds) for each in found] == [
        ("sdxl", "H100", "eager", 0.05),
        ("sdxl", "H100", "graph", 0.04),
        ("flux", "H100", "graph", 0.16),
    ]
    assert not measured.measured(figures(tmp_path, "T4"))


def test_the_longest_graph_calibrates_the_other_model(tmp_path: Path) -> None:
    models: Any = {"sdxl": Priced(0.02), "flux": Priced(0.08)}
    eager, graph, longest = list(measured.lines(models, figures(tmp_path, "H100")))[-3:]
    assert "| 22.0 | -56% | 42.0 | -16% |" in eager
    assert "| 20.0 | -50% | 40.0 | +0% |" in graph
    assert longest.endswith("| 80.0 | -50% |  |  |")


def calibrated(rows: Sequence[published.PublishedRow]) -> list[str]:
    """The column of seconds after calibration."""
    models: Any = {"sd15": Priced(1.0)}
    table = [line.split("|") for line in published.lines(models, rows) if line.startswith("| SD")]
    return [cells[6].strip() for cells in table]


def test_rows_are_calibrated_by_the_longest_of_the_same_device_and_software() -> None:
    """Not by another source, whose software may be a different one."""
    row = replace(published.ROWS[0], model="sd15", what="SD", costs=CostAssumptions(launch=0.0), seconds=2.0)
    longer = replace(row, seconds=4.0)
    assert calibrated([row, longer]) == ["4.00", ""]
    assert calibrated([row, replace(longer, source="elsewhere")]) == ["", ""]
    assert calibrated([row, replace(longer, device="H100")]) == ["", ""]


def test_every_model_of_the_rows_is_published() -> None:
    assert {each.model for each in published.ROWS} == set(published.MODELS)
