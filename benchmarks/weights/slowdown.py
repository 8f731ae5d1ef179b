"""What sharded weights add to a pass over whole ones, on ranks that share memory: the embedded models, in turns.

    python -m benchmarks.weights.slowdown --write docs/figures/weights-slowdown.md
    python -m benchmarks.weights.slowdown --model transformer --ranks 2 --turns 5

Each rank has a denoiser with whole weights, again with whole ones, and with sharded ones, all in equal patches of one
image (strategy exact), and calls them in turn, each as often first, second and third. Ratios to the first are medians
over the turns; that of whole weights again is 1 but for chance. A block computes: with whole weights; gather: of a
block alone, while nothing is computed; means of all blocks. On a CPU gathers are copies by the core that computes, so
that they are never hidden wholly: what they add is in the processor time, which other programs change little, and at
least the sum of all gathers.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.page import publish
from patchpar.launch.local import LocalExecutor

if TYPE_CHECKING:
    from benchmarks.weights.slowdown_ranks import Turns

RANKS = (2, 4)
MODELS = {"unet": (256, 512), "transformer": (256, 512)}
"""Sides of images, in pixels."""
LIMIT = 1.05


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--ranks", type=int, action="append", help=f"default: {RANKS}")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    publish(page(options.model or tuple(MODELS), options.ranks or RANKS, options.turns), options.write)


def page(models: tuple[str, ...], ranks: tuple[int, ...], turns: int) -> Iterator[str]:
    """Yield the lines of the page."""
    load, found = os.getloadavg()[0], []
    for count in ranks:
        with LocalExecutor(["cpu"] * count, "benchmarks.weights.slowdown_ranks:SlowdownRank", deadline=300.0) as pool:
            for model in models:
                for side in MODELS[model]:
                    of_ranks = pool.call("measure", model, side, turns, expected=600.0)
                    found.append(Slowdown(model=model, side=side, ranks=count, turns=of_ranks))
                    print(found[-1].row(), flush=True)
    hidden = [each.ratio for each in found if each.is_hidden]
    within = sum(each <= LIMIT for each in hidden)
    yield "# Sharded against whole weights on shared memory"
    yield ""
    yield (
        f"The embedded models in equal patches, one thread for each rank, {turns} calls of each kind in turns. By the "
        "law a gather is hidden where it is not longer than the block before it computes. Processor time: of all ranks "
        "together. In brackets: whole weights again, which is 1 but for chance. "
        f"Load of the machine at the start: {load:.1f} on {os.cpu_count()} cores. "
        "`python -m benchmarks.weights.slowdown`"
    )
    yield ""
    yield f"Of {len(hidden)} rows that are hidden by the law, {within} take at most {LIMIT - 1:.0%} longer."
    yield ""
    yield (
        "| model | pixels | ranks | blocks, MiB | a block computes, ms | gather, ms | hidden | whole, s | sharded, s "
        "| ratio | ratio of processor time |"
    )
    yield "|" + "---|" * 11
    yield from (each.row() for each in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """What ranks measured for images of `side` x `side` pixels."""

    model: str
    side: int
    ranks: int
    turns: Sequence[Turns]

    @property
    def is_hidden(self) -> bool:
        """Whether no gather takes longer than the block before it, the last block standing before the first."""
        compute, gather = self._of_blocks("compute"), self._of_blocks("gather")
        return all(each <= before for before, each in zip(compute, [*gather[1:], gather[0]], strict=True))

    @property
    def ratio(self) -> float:
        """How many times as long a call with sharded weights takes."""
        return self._ratio(self._slowest, "sharded")

    def _ratio(self, times: Callable[[str], list[float]], kind: str) -> float:
        return statistics.median(x / y for x, y in zip(times(kind), times("whole"), strict=True))

    def row(self) -> str:
        """Return one line of the table."""
        cells = [self.model, f"{self.side} x {self.side}", str(self.ranks), f"{self.turns[0].num_bytes / 2**20:.1f}"]
        cells += [f"{1e3 * statistics.fmean(self._of_blocks(what)):.2f}" for what in ("compute", "gather")]
        cells += ["yes" if self.is_hidden else "no"]
        cells += [f"{statistics.median(self._slowest(kind)):.3f}" for kind in ("whole", "sharded")]
        for times in (self._slowest, self._of_all):
            cells.append(f"{self._ratio(times, 'sharded'):.3f} ({self._ratio(times, 'again'):.3f})")
        return f"| {' | '.join(cells)} |"

    def _of_all(self, kind: str) -> list[float]:
        return [sum(each) for each in zip(*(rank.processor[kind] for rank in self.turns), strict=True)]

    def _slowest(self, kind: str) -> list[float]:
        return [max(each) for each in zip(*(rank.seconds[kind] for rank in self.turns), strict=True)]

    def _of_blocks(self, what: str) -> list[float]:
        """Return the seconds of each block, medians over the turns, of the slowest rank."""
        of_ranks = ([statistics.median(each) for each in zip(*getattr(rank, what), strict=True)] for rank in self.turns)
        return [max(each) for each in zip(*of_ranks, strict=True)]


if __name__ == "__main__":
    main()
