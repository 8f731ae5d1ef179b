"""The memory of ranks as it is predicted, beside that of real ranks on this CPU.

    python -m benchmarks.forecast.memory --write docs/figures/memory.md
    python -m benchmarks.forecast.memory --setting embedded:128

Predicted are weights, the most bytes of tensors that are alive at a time in a call after the first, and the same with
the buffers of kernels. Measured are the storages that are alive, counted operator by operator, and the private memory
of the process. Both need no quiet machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.forecast.memory_ranks import MeasuredMemory
from benchmarks.gpu.quiet import quiet_process
from benchmarks.page import publish
from patchpar.launch.local import LocalExecutor
from patchpar.models.files import resolve_model
from patchpar.pipeline.planner.empty_model import EmptyModel
from patchpar.pipeline.planner.rank_memory import RankMemory, memory_of
from patchpar.pipeline.planner.simulate import SimulatedSteps
from patchpar.plan.plan import Plan

RUNNER = "benchmarks.forecast.memory_ranks:MemoryRank"
SETTINGS = ("embedded:256", "embedded:384", "embedded-dit:512")
PLANS = (
    "single",
    "cfg=2",
    "patch=2",
    "patch=2,strategy=displaced:warmup_steps=1",
    "patch=2,strategy=fresh-edges:warmup_steps=1",
)
CALL = {"prompt": "a red house on the left, green hills at sunset", "output_type": "pt"}
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank of a plan."""

    setting: str
    plan: str
    rank: int
    predicted: RankMemory
    measured: MeasuredMemory

    @property
    def tensors(self) -> int:
        """Predicted, with the weights."""
        return self.predicted.weights + self.predicted.tensors

    @property
    def bytes(self) -> int:
        """Predicted, with buffers of kernels, without a context: a CPU has none."""
        return self.tensors + self.predicted.buffers

    @property
    def off(self) -> tuple[float, float]:
        """The relative errors against storages and private memory."""
        return self.tensors / self.measured.storages - 1, self.bytes / self.measured.private - 1

    def line(self) -> str:
        """Return the row of the table."""
        measured = self.measured
        sizes = (self.predicted.weights, self.tensors, self.bytes, measured.storages, measured.private)
        cells = [self.setting, f"`{self.plan}`", str(self.rank), *(f"{size / MIB:.1f}" for size in sizes)]
        return f"| {' | '.join([*cells, *(f'{error:+.1%}' for error in self.off)])} |"


def rows_of(setting: str, plans: Sequence[str]) -> Iterator[Row]:
    """Measure one model and size under every plan."""
    name, _, side = setting.partition(":")
    call = {**CALL, "height": int(side), "width": int(side)}
    folder, options, _ = resolve_model(name, {})
    loading = {"torch_dtype": options["torch_dtype"], "variant": options["variant"]}
    empty = EmptyModel(Path(folder), loading, call, joined=False)
    with LocalExecutor(["cpu", "cpu"], RUNNER, deadline=600.0) as ranks:
        for plan in plans:
            simulated = SimulatedSteps.of(Plan.parse(plan))
            steps = {"num_inference_steps": max(2, simulated.recorded)}
            found = ranks.call("measure", (folder, options), plan, {**call, **steps}, expected=900.0)
            for rank, recorded in enumerate(empty.ranks(simulated.plan, steps["num_inference_steps"]).ranks):
                row = Row(setting=setting, plan=plan, rank=rank, predicted=memory_of(recorded), measured=found[rank])
                print(row.line(), flush=True)
                yield row


def page(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Predicted and measured memory"
    yield ""
    yield (
        "By `python -m benchmarks.forecast.memory`. Ranks of one thread each on CPU cores, float32, two steps or, with "
        "stale values, four; MiB of a call after the first. Predicted: weights; with the most bytes of tensors that "
        "are alive at a time; with buffers of kernels too. Storages: those that were alive in a real call. Private: "
        "the most that is not of files or of memory that ranks have in common, as Linux notes it, beyond what it kept "
        "after a call before without its weights and stale values."
    )
    yield ""
    yield (
        "Buffers are those of convolutions: oneDNN copies maps and weight into a layout of its own, and the result "
        "back, unless the channels of a pixel lie side by side. On GPUs cuDNN does so too; that is not measured. And "
        "2 MiB for what is too small to be counted."
    )
    yield ""
    yield (
        "The ranks let the C library give freed memory back at once (`MALLOC_MMAP_THRESHOLD_=65536`). By default glibc "
        "keeps what is freed in holes, as many as a process has ever needed, and fills whichever fits best: in one "
        "process the same call of the embedded UNet at 256² then took 78 to 96 MiB in four runs, where tensors and "
        "buffers are 30 MiB. That depends on all that the process has done before, and is not predicted."
    )
    yield ""
    for name, errors in zip(
        ("live storages", "private memory"), zip(*(row.off for row in rows), strict=True), strict=True
    ):
        within = sum(abs(each) <= 0.1 for each in errors)
        yield (
            f"Against {name}: {within} of {len(errors)} rows within 10 %, {min(errors):+.1%} to {max(errors):+.1%}; "
            f"{sum(each < 0 for each in errors)} below."
        )
    yield ""
    yield (
        "| setting | plan | rank | weights | with tensors | with buffers | storages | private | off storages "
        "| off private |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    yield from (row.line() for row in rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", metavar="MODEL:PIXELS", help=f"default: {', '.join(SETTINGS)}")
    parser.add_argument("--plan", action="append", help=f"default: {', '.join(PLANS)}")
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    quiet_process(threads=1)
    rows = list[Row]()
    for setting in options.setting or SETTINGS:
        rows.extend(rows_of(setting, options.plan or PLANS))
        publish(page(rows), options.write)


if __name__ == "__main__":
    main()
