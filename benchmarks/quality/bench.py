"""The loop of `benchmarks.quality`: ranks, settings, methods and captions, and of these only what is missing."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu.battery.environment import commit_of
from benchmarks.quality.generation import Caption, Comparison, Meter, OneProcess, Ranks
from benchmarks.quality.records import ONE_PROCESS, Named, Record, Records, Setting
from patchpar import Run
from patchpar.errors import PatchparError
from patchpar.launch.devices import available_cores

REPOSITORY = Path(__file__).parents[2]
PLAIN = Named(label="one process", text="", method=ONE_PROCESS)


@cache
def versions_here() -> str:
    """The versions that images are made with, and the commit of patchpar."""
    numbers = ", ".join(f"{package} {version(package)}" for package in ("torch", "diffusers", "patchpar"))
    return f"{numbers} {commit_of(REPOSITORY)}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What drawing took, for one image of those generated together. See `Record`."""

    bytes_per_step: float
    stale_step_bytes: float | None
    seconds_waited: float
    exact_steps: int


def cost_of(run: Run, images: int) -> Cost:
    """The cost of one call that drew so many images."""
    stale = [
        statistics.fmean(sum(step.bytes_sent.values()) for step in rank.steps if step.stale_calls)
        for rank in run.ranks
        if rank.stale_calls
    ]
    return Cost(
        bytes_per_step=max(run.bytes_per_step) / images,
        stale_step_bytes=max(stale) / images if stale else None,
        seconds_waited=max(sum(rank.seconds_waited.values()) for rank in run.ranks) / run.steps,
        exact_steps=run.steps if run.exact_steps is None else run.exact_steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One method in one setting."""

    setting: Setting
    named: Named
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.setting}, {self.ranks} ranks, {self.named.label}"

    def records(self, batch: Sequence[Caption], comparisons: Sequence[Comparison], cost: Cost) -> list[Record]:
        """What a batch came to."""
        return [
            Record(
                setting=self.setting,
                method=self.named.method,
                label=self.named.label,
                ranks=self.ranks,
                caption=caption.index,
                batch=len(batch),
                cores=available_cores(),
                versions=versions_here(),
                **asdict(comparison),
                **asdict(cost),
            )
            for caption, comparison in zip(batch, comparisons, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every cell needs. `batch`: captions generated together; `again`: generate also what is known."""

    model: Path
    one: OneProcess
    meter: Meter
    records: Records
    captions: Sequence[Caption]
    batch: int
    again: bool

    def measure(self, settings: Sequence[Setting], methods: Sequence[Named], ranks: Sequence[int]) -> int:
        """Generate and write down all that is missing; the number of cells that could not be generated."""
        for setting in settings:
            self._write_exact(Cell(setting=setting, named=PLAIN))
        failed = 0
        for count in ranks:
            pairs = itertools.product(settings, methods)
            cells = [Cell(setting=setting, named=named, ranks=count) for setting, named in pairs]
            cells = [cell for cell in cells if self._missing(cell)]
            if cells:
                failed += self._write_cells(cells, count)
        return failed

    def _missing(self, cell: Cell) -> list[list[Caption]]:
        """Batches of captions that the file does not know, or knows without a figure that can be had now."""
        todo = [caption for caption in self.captions if self._lacks(cell, caption)]
        return [todo[start : start + self.batch] for start in range(0, len(todo), self.batch)]

    def _lacks(self, cell: Cell, caption: Caption) -> bool:
        known = self.records.find((cell.setting, cell.named.method, cell.ranks, caption.index))
        return known is None or self.again or (known.lpips is None and self.meter.lpips is not None)

    def _write_exact(self, cell: Cell) -> None:
        """The row of one process: what the classifier says of the exact images."""
        nothing = Cost(bytes_per_step=0.0, stale_step_bytes=None, seconds_waited=0.0, exact_steps=cell.setting.steps)
        for batch in self._missing(cell):
            exact = self.one.exact(cell.setting, batch)
            self.records.add(cell.records(batch, self.meter.compare(exact, exact, batch), nothing))

    def _write_cells(self, cells: Sequence[Cell], count: int) -> int:
        failed = 0
        with Ranks(self.model, count) as ranks:
            for cell in cells:
                try:
                    self._write_cell(ranks, cell)
                except PatchparError as error:
                    failed += 1
                    print(f"{cell}: {error}", file=sys.stderr, flush=True)
        return failed

    def _write_cell(self, ranks: Ranks, cell: Cell) -> None:
        batches = self._missing(cell)
        with ranks.under(cell.named, cell.setting, self.one.scheduler(cell.setting.scheduler), batches[0][0]):
            for batch in batches:
                exact, start = self.one.exact(cell.setting, batch), time.perf_counter()
                latents, run = ranks.generate(cell.setting, batch)
                comparisons = self.meter.compare(self.one.decode(latents), exact, batch)
                self.records.add(cell.records(batch, comparisons, cost_of(run, len(batch))))
                mean = statistics.fmean(comparison.psnr_db for comparison in comparisons)
                seconds = time.perf_counter() - start
                print(f"{cell}, {len(batch)} captions: {mean:.1f} dB, {seconds:.0f} s", flush=True)
