"""Forwards that were measured on the GPU of docs/figures/gpu.md, beside steps from the catalogue for that device.

And steps of one rank of four, whose messages cost nothing, beside the kernels of such a rank.

Nothing of the catalogue and of what is assumed was chosen by these rows but the time of an RMS norm's rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.forecast.models import flux, sdxl
from benchmarks.forecast.recorded import RecordedModel
from patchpar.plan.plan import Plan
from patchpar.plan.replay.device_catalogue import DEVICES
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.occupancy import ROWS_AT_A_TIME, SECONDS_OF_A_ROW
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "gpu.json"
SECTION, PLAIN, LAYERS = "A rank's own work", "plain", "Layers of a plain forward"
ONE_BLOCK_A_ROW = "https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/layer_norm_kernel.cu"
MODELS = {"sdxl": sdxl, "flux": flux}
TITLES = {"sdxl": "SDXL, both branches", "flux": "FLUX.1 dev"}
EAGER, GRAPH = "eager", "graph"
COSTS = {EAGER: ASSUMED, GRAPH: AS_GRAPH}
OF_RANKS = ("exact", "displaced", "fresh-edges")
"""Strategies whose ranks are predicted, as graphs: from Python they wait for their process alone."""
RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredForward:
    """Seconds of a denoiser's forward at 1024 x 1024 on a device of the catalogue. `how`: eager, or graph.

    `plan`: of which one rank was measured, with messages that cost nothing.
    """

    model: str
    device: str
    how: str
    seconds: float
    plan: str = "single"


def measured(figures: Path = FIGURES) -> list[MeasuredForward]:
    """Return what the battery of GPU measurements has found for one process, and for one rank, as graphs.

    On a device that the catalogue has.
    """
    sections = {each["heading"]: each for each in json.loads(figures.read_text())}
    names = re.findall(r"\w+", " ".join(sections[""]["text"]))
    device = next((each.name for each in DEVICES if each.name in names), None)
    rows: list[dict[str, Any]] = [row for table in sections.get(SECTION, {"tables": []})["tables"] for row in table]
    if device is None:
        return []
    found = [(row, _plan_of(row["strategy"].strip("`"), row["step"])) for row in rows if row["model"] in MODELS]
    return [
        MeasuredForward(
            model=row["model"], device=device, how=row["step"].split()[-1], seconds=_seconds(row["ms"]), plan=plan
        )
        for row, plan in found
        if plan
    ]


def _plan_of(strategy: str, step: str) -> str:
    """Return the plan of a row; empty for one that is not predicted."""
    if strategy == PLAIN:
        return "single"
    return f"patch={RANKS},strategy={strategy}" if strategy in OF_RANKS and step.endswith(GRAPH) else ""


def _seconds(milliseconds: str) -> float:
    """Return what a cell of the page has, which groups the digits of large numbers."""
    return 1e-3 * float(milliseconds.replace(",", ""))


def lines(models: Mapping[str, RecordedModel], figures: Path = FIGURES) -> Iterator[str]:
    """Yield the table. The longest forward without launches calibrates those of the other model."""
    rows = measured(figures)
    yield (
        "Forwards of the denoiser at 1024 x 1024, [measured](gpu.md) with random weights in one process, beside the "
        "predicted step, which also has what the scheduler computes; and kernels of one rank of four, whose messages "
        "cost nothing there and are left out here. Nothing was chosen by these rows but the time of a row of an RMS "
        "norm. `calibrated`: kernels scaled by the longest forward as a graph; of that model itself it is left out. "
        "What is launched by Python depends on the host, of which the page of measurements says how it varied."
    )
    yield ""
    yield "| call | device | plan | launched | measured ms | predicted ms | error | calibrated | error |"
    yield "|---|---|---|---|---|---|---|---|---|"
    longest = max((row for row in rows if row.how == GRAPH), key=lambda row: row.seconds, default=None)
    for row in rows:
        found = _predicted(models, row)
        cells = [TITLES[row.model], row.device, f"`{row.plan}`", row.how, *_cells(row, found), "", ""]
        if longest is not None and row.model != longest.model:
            cells[-2:] = _cells(row, _predicted(models, row, longest.seconds / _predicted(models, longest)))[1:]
        yield f"| {' | '.join(cells)} |"
    yield from _of_norms(figures)


def _of_norms(figures: Path) -> Iterator[str]:
    """Yield what is known of the norms of FLUX, if its layers were measured."""
    sections = {each["heading"]: each["tables"] for each in json.loads(figures.read_text())}
    rows = [row for table in sections.get(LAYERS, []) for row in table]
    for row in rows:
        if (row["model"], row["layer"]) == ("flux", "RMSNorm"):
            yield ""
            yield (
                f"The {row['calls']} RMS norms of FLUX's heads took {row['ms']} ms "
                f"([layers](gpu.md#{LAYERS.lower().replace(' ', '-')})), several times what their bytes take at the "
                f"rate of the memory: torch's kernel has [a block of 128 threads for each row]({ONE_BLOCK_A_ROW}), of "
                "which a head of 128 values, read four at a time, occupies 32. Chosen by this figure, forecasts take "
                f"{1e6 * SECONDS_OF_A_ROW:.2f} µs for such a block, of which a processor has {ROWS_AT_A_TIME} at a "
                "time, where that is longer than what the bytes take."
            )


def _cells(row: MeasuredForward, found: float) -> list[str]:
    return [f"{1e3 * row.seconds:.1f}", f"{1e3 * found:.1f}", f"{found / row.seconds - 1:+.0%}"]


def _predicted(models: Mapping[str, RecordedModel], row: MeasuredForward, scale: float = 1.0) -> float:
    costs = replace(COSTS[row.how], scale=scale)
    plan = Plan.parse(row.plan)
    step = models[row.model].forecast(plan, Machine.parse(f"{plan.world_size}x{row.device}"), 1, costs).step
    return step.seconds if plan.world_size == 1 else step.compute
