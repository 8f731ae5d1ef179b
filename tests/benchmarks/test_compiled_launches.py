"""What a launch from compiled blocks is assumed to cost is what the measured forwards of docs/figures/gpu.md took."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.forecast.models import asking, flux, qwen, sdxl
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.plan.plan import Plan
from patchpar.plan.replay.price import ASSUMED, BLOCKS_COMPILED, LAUNCHES, fused
from patchpar.plan.replay.tape import QUESTIONS, Boundary, Operator, Tape, steps_of

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "gpu.json"
BLOCK = re.compile(r".*transformer_blocks\.\d+")


def step_of(model: Any) -> Tape:
    pipe, call = model()
    recording = Recording(pipe, Plan(), call, RecordOptions(joined=True, steps=1))
    return steps_of(recording.of_rank(0).tape)["step 0"]


def measured_host(section: str, model: str) -> float:
    """Seconds for which the process launched the plain forward from Python."""
    sections = {each["heading"]: each["tables"] for each in json.loads(FIGURES.read_text())}
    rows = [row for table in sections[section] for row in table]
    (row,) = [row for row in rows if (row["model"], row["strategy"], row["step"]) == (model, "plain", "eager")]
    return 1e-3 * float(row["host ms"])


def launches(tape: Tape) -> tuple[int, int, int]:
    """How many blocks are called, how many fused kernels they have, and how many launches are outside of them."""
    blocks, kernels, outside, inside, run = 0, 0, 0, "", list[Operator]()
    for entry in (*tape, Boundary("")):
        if isinstance(entry, Boundary):
            kernels += len(list(fused(run)))
            found = BLOCK.match(entry.name)
            before, inside, run = inside, found.group() if found else "", []
            blocks += bool(inside) and inside != before
        elif isinstance(entry, Operator) and inside:
            run.append(entry)
        elif isinstance(entry, Operator):
            outside += LAUNCHES.get(entry.name, 1)
    return blocks, kernels, outside


def test_a_launch_from_compiled_blocks_is_what_two_networks_took_on_one_host() -> None:
    """FLUX's device was slower than its eager process, so that SDXL says what an eager launch took there."""
    tapes = {"flux": step_of(flux), "sdxl": step_of(sdxl)}
    eager = sum(LAUNCHES.get(each.name, 1) for each in tapes["sdxl"] if isinstance(each, Operator))
    of_launch = measured_host("A rank's own work", "sdxl") / eager
    slower = of_launch / ASSUMED.launch
    assert slower == pytest.approx(2.0, rel=0.02)
    for name, tape in tapes.items():
        blocks, kernels, outside = launches(tape)
        in_blocks = measured_host("With compiled blocks", f"{name}, compiled") - outside * of_launch
        found = (in_blocks / slower - blocks * BLOCKS_COMPILED.region) / kernels
        assert found == pytest.approx(BLOCKS_COMPILED.launch, rel=0.1), name


@pytest.mark.parametrize("asks", [True, False])
def test_a_question_before_each_attention_is_on_the_tape_of_software_that_asks(*, asks: bool) -> None:
    model = qwen(256)
    names = [each.name for each in step_of(asking(model) if asks else model) if isinstance(each, Operator)]
    kinds = [each for each in names if each in ("attention", *QUESTIONS)]
    assert kinds == ["_local_scalar_dense", "attention"] * 120 if asks else ["attention"] * 120
