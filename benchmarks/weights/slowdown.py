"""What sharded weights add to a pass over whole ones, on ranks that share memory: the embedded models, in turns.

    python -m benchmarks.weights.slowdown --write docs/figures/weights-slowdown.md
    python -m benchmarks.weights.slowdown --model transformer --ranks 2 --turns 5

Each rank has a denoiser with whole weights, again with whole ones, and with sharded ones, all in equal patches of one
image (strategy exact), and calls them in turn, each as often first, second and third. Ratios to the first are medians
over the turns; that of whole weights again is 1 but for chance. A block computes: with whole weights; gather: of a
block alone, while nothing is computed; means of all blocks. Beside each ratio is that of two laws of a pass: the sum of
max(block, next gather) where something else copies while a block computes, and the sum of blocks and gathers where one
core does both, as here: nothing is hidden on a CPU. Weights are used where they lie, so that a gather copies only what
lies in several shards.
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
from benchmarks.weights.formulas import pass_of
from patchpar.launch.local import LocalExecutor
from patchpar.shard.weights.sharded import SLOTS

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
    yield "# Sharded against whole weights on shared memory"
    yield ""
    yield (
        f"The embedded models in equal patches, one thread for each rank, {turns} calls of each kind in turns. Hidden: "
        "no gather takes longer than the block before it computes, so that by the law for gathers beside the computing "
        "(`beside`: each block or the next gather, whichever is longer) it adds nothing. On a CPU the core that "
        "computes also copies, so that nothing runs beside it: by the law for that (`in turn`) a call takes the sum "
        "of both. Weights are used where they lie, and what lies in several shards is copied. Processor time: of all ranks together. In brackets: whole weights again, which is 1 but for chance. "
        f"Load of the machine at the start: {load:.1f} on {os.cpu_count()} cores. "
        "`python -m benchmarks.weights.slowdown`"
    )
    yield ""
    off = [each.ratio / each.in_turn - 1 for each in found]
    within, by_law = sum(each <= LIMIT for each in hidden), sum(abs(each) <= LIMIT - 1 for each in off)
    yield (
        f"Of {len(hidden)} rows that would be hidden beside the computing, {within} take at most {LIMIT - 1:.0%} "
        f"longer than with whole weights. {by_law} of {len(off)} rows are within {LIMIT - 1:.0%} of the law for "
        f"gathers in turn, worst {max(off, key=abs):+.1%}."
    )
    yield ""
    yield (
        "| model | pixels | ranks | blocks, MiB | a block computes, ms | gather, ms | hidden | whole, s | sharded, s "
        "| ratio | beside | in turn | ratio of processor time |"
    )
    yield "|" + "---|" * 13
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

    @property
    def beside(self) -> float:
        """The same by law, where something else gathers while a block computes."""
        compute, gather = self._of_blocks("compute"), self._of_blocks("gather")
        return 1 + (pass_of(compute, gather, SLOTS) - sum(compute)) / self._median("whole")

    @property
    def in_turn(self) -> float:
        """The same by law, where one core computes and gathers."""
        return 1 + sum(self._of_blocks("gather")) / self._median("whole")

    def _median(self, kind: str) -> float:
        return statistics.median(self._slowest(kind))

    def _ratio(self, times: Callable[[str], list[float]], kind: str) -> float:
        return statistics.median(x / y for x, y in zip(times(kind), times("whole"), strict=True))

    def row(self) -> str:
        """Return one line of the table."""
        cells = [self.model, f"{self.side} x {self.side}", str(self.ranks), f"{self.turns[0].num_bytes / 2**20:.1f}"]
        cells += [f"{1e3 * statistics.fmean(self._of_blocks(what)):.2f}" for what in ("compute", "gather")]
        cells += ["yes" if self.is_hidden else "no"]
        cells += [f"{self._median(kind):.3f}" for kind in ("whole", "sharded")]
        cells += [self._beside_chance(self._slowest), f"{self.beside:.3f}", f"{self.in_turn:.3f}"]
        return f"| {' | '.join([*cells, self._beside_chance(self._of_all)])} |"

    def _beside_chance(self, times: Callable[[str], list[float]]) -> str:
        return f"{self._ratio(times, 'sharded'):.3f} ({self._ratio(times, 'again'):.3f})"

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
