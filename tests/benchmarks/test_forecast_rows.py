"""Rows of forecasts beside measurements: which are read, and by which the others are calibrated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.forecast import measured, published, published_plans, published_rows
from benchmarks.forecast.fp8 import Fp8Linear, with_fp8
from benchmarks.forecast.models import before_torch_2_9
from benchmarks.page import write_page
from patchpar.errors import PlanError
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import META, MetaMode
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import CostAssumptions, kernel_seconds
from patchpar.plan.replay.tape import Operator
from tests import tiny
from tests.planner.on_ranks import call_of

PAGE = """# On GPUs

On GPU 0: NVIDIA {name} (UUID: GPU-0).

## A rank's own work

| model | strategy | step | ms |
|---|---|---|---|
| sdxl | plain | eager | 50 |
| sdxl | plain | graph | 40 |
| sdxl | `exact` | exact, eager | 90 |
| sdxl | `exact` | exact, graph | 20 |
| sdxl | `pcpp` | stale, graph | 21 |
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
    def compute(self) -> float:
        """Of a rank, which does not wait."""
        return 0.5 * self.seconds

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
    assert [(each.model, each.device, each.how, each.seconds, each.plan) for each in found] == [
        ("sdxl", "H100", "eager", 0.05, "single"),
        ("sdxl", "H100", "graph", 0.04, "single"),
        ("sdxl", "H100", "graph", 0.02, "patch=4,strategy=exact"),
        ("flux", "H100", "graph", 0.16, "single"),
    ]
    assert not measured.measured(figures(tmp_path, "T4"))


def test_the_longest_graph_calibrates_the_other_model(tmp_path: Path) -> None:
    models: Any = {"sdxl": Priced(0.02), "flux": Priced(0.08)}
    eager, graph, rank, longest = list(measured.lines(models, figures(tmp_path, "H100")))[-4:]
    assert "| 22.0 | -56% | 42.0 | -16% |" in eager
    assert "| 20.0 | -50% | 40.0 | +0% |" in graph
    assert "| `patch=4,strategy=exact` | graph | 20.0 | 10.0 | -50% | 20.0 | +0% |" in rank, "without its waits"
    assert longest.endswith("| 80.0 | -50% |  |  |")


def test_what_the_norms_of_flux_took_is_said_where_layers_were_measured(tmp_path: Path) -> None:
    """As of the committed figures, whose step is predicted too short."""
    models: Any = {"sdxl": Priced(0.02), "flux": Priced(0.08)}
    assert "The 152 RMS norms of FLUX's heads took 8.49 ms" in list(measured.lines(models))[-1]
    assert "RMS norms" not in "".join(measured.lines(models, figures(tmp_path, "H100")))


def test_norms_before_torch_2_9_are_the_kernels_they_consist_of() -> None:
    kernels = []
    for model in (tiny_flux, before_torch_2_9(tiny_flux)):
        pipe, call = model()
        recording = Recording(pipe, Plan(), call, RecordOptions(joined=True, steps=1))
        kernels.append(Counter(each.name for each in recording.of_rank(0).tape if isinstance(each, Operator)))
    now, before = kernels
    assert now["_fused_rms_norm"] > 0 == before["_fused_rms_norm"]
    assert before["rsqrt"] - now["rsqrt"] == now["_fused_rms_norm"]


def tiny_flux() -> tuple[Any, dict[str, Any]]:
    return tiny.build("flux").pipe, call_of("flux", 1)


def calibrated(rows: Sequence[published_rows.PublishedRow]) -> list[str]:
    """The column of seconds after calibration."""
    models: Any = {"sd15": Priced(1.0)}
    table = [line.split("|") for line in published.lines(models, rows) if line.startswith("| SD")]
    return [cells[6].strip() for cells in table]


def test_rows_are_calibrated_by_the_longest_of_the_same_device_and_software() -> None:
    """Not by another source, whose software may be a different one."""
    row = replace(published_rows.ROWS[0], model="sd15", what="SD", costs=CostAssumptions(launch=0.0), seconds=2.0)
    longer = replace(row, seconds=4.0)
    assert calibrated([row, longer]) == ["4.00", ""]
    assert calibrated([row, replace(longer, source="elsewhere")]) == ["", ""]
    assert calibrated([row, replace(longer, device="H100")]) == ["", ""]


@pytest.mark.parametrize("module", [published_rows, published_plans])
def test_every_model_of_the_rows_is_published(module: Any) -> None:
    assert {each.model for each in module.ROWS} == set(module.MODELS)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A model whose steps are divided by a plan, and whose decoding takes five seconds on one rank and one on two."""

    kernels: float

    def forecast(self, plan: Plan, machine: Any, steps: int, assumed: CostAssumptions) -> Any:
        decode = Part(seconds=1.0 if plan.patch > 1 else 5.0)

        @dataclass(frozen=True, slots=True)
        class Whole:
            seconds: float
            phases: dict[str, Part]

        return Whole(seconds=steps * self.kernels / plan.patch + decode.seconds, phases={"decode": decode})


def test_rows_of_several_devices_decode_on_one_and_are_beside_that_of_one_device() -> None:
    """Of two rows that are not held up one is within a fifth; one that waits for Python is counted apart."""
    one = replace(published_plans.ROWS[0], model="flux", steps=10, seconds=15.0, note="")
    two = replace(one, plan="patch=2", seconds=20.0)
    slow = replace(two, seconds=40.0, note=published_plans.BY_PYTHON)
    models: Any = {"flux": Decoded(1.0)}
    *table, _, summary, _, off = published_plans.lines(models, [one, two, slow])
    assert off == published_plans.OFF
    cells = [[cell.strip() for cell in line.split("|")[4:9]] for line in table[-3:]]
    assert cells[0] == ["15.00", "15.00", "+0%", "", ""]
    assert cells[1] == ["20.00", "10.00", "-50%", "0.75x", "1.50x"]
    assert cells[2] == ["40.00", "10.00", "-75%", "0.38x", "1.50x"]
    assert "Python 1 of 2 rows are within 20 %, half of them within 25%; of their speed-ups 0 of 1 rows" in summary
    assert summary.endswith("Of those that wait, 0 of 1 rows are.")


def test_a_phase_is_predicted_alone() -> None:
    @dataclass(frozen=True, slots=True)
    class Whole:
        seconds: float
        phases: dict[str, Part]

    class WithPhases:
        def forecast(self, plan: Any, machine: Any, steps: int, assumed: CostAssumptions) -> Whole:
            return Whole(5.0, {"encode": Part(seconds=0.25)})

    row = replace(published_rows.ROWS[0], what="SD", seconds=0.5, phase="encode")
    models: Any = {row.model: WithPhases()}
    (line,) = (each for each in published.lines(models, [row]) if each.startswith("| SD"))
    assert "| 0.5000 | 0.2500 | -50% |" in line


def test_products_of_fp8_are_recorded_by_their_inputs_and_twice_as_fast() -> None:
    found: list[Operator] = []
    linear = torch.nn.Linear(4096, 8192, device=META, dtype=torch.bfloat16)
    x = torch.empty(2, 4096, 4096, device=META, dtype=torch.bfloat16)
    with torch.no_grad(), MetaMode(LiveBytes(""), found.append):
        assert Fp8Linear(linear)(x).shape == (2, 4096, 8192)
    (product,) = (each for each in found if each.flops)
    assert (product.dtype, product.dims) == ("float8_e4m3fn", (8192, 8192, 4096))
    machine = Machine.parse("L20")
    with pytest.raises(PlanError, match="no rate of L20"):
        kernel_seconds(product, machine.device)
    costs = CostAssumptions(gap=0.0)
    half = kernel_seconds(product._replace(dtype="bfloat16"), machine.device, costs)
    assert kernel_seconds(product, with_fp8(machine).device, costs) == pytest.approx(half / 2)


def test_what_steps_take_beside_the_forecast_is_said_of_both_sizes() -> None:
    """Of rows of Qwen-Image alone: 40 ms in each of 20 steps, and none in each of 35, of two calls of 60 blocks."""
    rows = [row for row in published_rows.ROWS if row.model.startswith("qwen")]
    predicted = {row: row.seconds - missing for row, missing in zip(rows, (20 * 0.04, 0.0), strict=True)}
    text = "\n".join(published._of_the_process(rows, predicted))
    assert "take 40 ms (512 x 512) and 0 ms (1536 x 1536) more than predicted: 0.33 and 0.00 ms for each call" in text
    assert not list(published._of_the_process([], {}))
