"""Passes with sharded weights, in exact stages and in pieces, against their laws: blocks sleep, links are delayed.

    python -m benchmarks.weights.laws --write docs/figures/weights-laws.md
    python -m benchmarks.weights.laws --only piped --seconds 2        # longer sleeps, for a machine that is busy

What ranks compute takes no processor time, so that other programs disturb little. Everything else is what a call does:
slots and gathers, hand-overs, pieces and predictions in bands, by CPU workers over the transport of workers, which
brings messages no earlier than a link of that latency and rate would. Every rank checks what it gets.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.page import publish_section
from benchmarks.weights.formulas import PipedCase, ShardedCase, StageCase
from benchmarks.weights.sleeping import BLOCKS, COLUMNS, ROWS
from patchpar.launch.local import LocalExecutor

RANKS = (2, 4)
MIB = 2**20
LATENCY = 0.002
UNEVEN = ((0.5, 1), (1.5, 3), (1.0, 2), (1.0, 1), (0.5, 2), (1.5, 3))
"""Seconds and bytes of blocks, in units of the mean."""
GATHERS = (0.5, 1.0, 2.0)  # of the seconds that a block computes
HAND_OVERS = (0.0, 0.2)  # of the seconds that a stage computes a piece
PIECES = {2: (2, 3, 4), 4: (4, 5, 6)}
TOKENS = ROWS * COLUMNS
SIZES = {"num_bytes": TOKENS * 64 * 4, "prediction_bytes": TOKENS * 32 * 4, "blocks": BLOCKS}
PARTS = ("sharded", "stages", "piped")
LIMITS = {"sharded": 0.08, "stages": 0.05, "piped": 0.05}


def sharded_cases(seconds: float) -> Iterator[tuple[str, ShardedCase]]:
    """Yield what a row is called, and its case. A block sleeps for an eighth of `seconds`, in the mean."""
    for ranks in RANKS:
        for name, blocks in {"equal": ((1.0, 1),) * 6, "uneven": UNEVEN}.items():
            for part in GATHERS:
                of_block, mean = seconds / 8, sum(size for _, size in blocks) / len(blocks)
                sizes = tuple((each * of_block, int(size * MIB / 2)) for each, size in blocks)
                rate = mean * MIB / 2 / ranks * (ranks - 1) / (part * of_block - LATENCY)
                case = ShardedCase(ranks=ranks, blocks=sizes, latency=LATENCY, rate=rate)
                yield f"{ranks} | {name} | {part:g} | 2", case
    yield (
        "2 | equal | 1 | 1",
        ShardedCase(
            **{"ranks": 2, "blocks": ((seconds / 8, MIB // 2),) * 6, "latency": LATENCY, "slots": 1},
            rate=MIB / 4 / (seconds / 8 - LATENCY),
        ),
    )


def stage_cases(seconds: float) -> Iterator[tuple[str, StageCase]]:
    """Yield cases of blocks that sleep for half of `seconds`."""
    for stages in RANKS:
        for part in HAND_OVERS:
            of_block = seconds / 2
            hand_over = part * of_block * BLOCKS / stages
            yield f"{stages} | {part:g}", StageCase(stages=stages, seconds=of_block, hand_over=hand_over, **SIZES)


def piped_cases(seconds: float) -> Iterator[tuple[str, PipedCase]]:
    """Yield cases of blocks that sleep for so many `seconds` for all tokens."""
    for stages in RANKS:
        for pieces in PIECES[stages]:
            for part in HAND_OVERS:
                hand_over = part * seconds * BLOCKS / stages / pieces
                yield (
                    f"{stages} | {pieces} | {part:g}",
                    PipedCase(stages=stages, pieces=pieces, seconds=seconds, hand_over=hand_over, **SIZES),
                )


OPENING = """# Passes of divided models against their laws

Blocks sleep, which takes no processor time, and messages arrive no earlier than a link of a latency and a rate brings \
them. Seconds until the slowest rank has all outputs, which are those of one rank, bit for bit (of pieces: the same \
bits on all stages). Processor: time of the busiest rank's processor, which is not in the law. \
`python -m benchmarks.weights.laws`
"""
HEADS = {
    "sharded": "ranks | blocks | gather / compute | slots | not overlapped, s",
    "stages": "stages | hand-over / a stage's seconds",
    "piped": "stages | pieces | hand-over / a piece's seconds | a step by the law, s",
}
TITLES = {"sharded": "Sharded weights", "stages": "Exact stages", "piped": "Piped stages"}
TEXTS = {
    "sharded": "Six blocks; times of {count} passes, in which every block is gathered. With one slot nothing overlaps: "
    "a measurement that did not see gathers would fail there. Law: the sum of max(seconds of a block, gather of the "
    "next one).",
    "stages": "A transformer of eight blocks, {count} calls. Law: all blocks, a hand-over at each cut, and the "
    "prediction.",
    "piped": "The same transformer, {count} steps in pieces after an exact one. Law: max(c, N (c / M + λ)) a step, and "
    "the last piece through all stages.",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="the others stay as they are in the page to --write"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of a block of piped stages; others are parts of it")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    with LocalExecutor(["cpu"] * max(RANKS), "benchmarks.weights.law_ranks:LawRank", deadline=600.0) as pool:
        for part in options.only or PARTS:
            lines = table(pool, part, list(CASES[part](options.seconds)))
            publish_section(OPENING, TITLES[part], lines, options.write)


def table(pool: LocalExecutor, part: str, cases: Sequence[tuple[str, object]]) -> Iterator[str]:
    """Yield a table, what it says, and how far the worst row is off. Rows are also printed as they are measured."""
    yield _load()
    rows, off = [], []
    for name, case in cases:
        found = [each for each in pool.call(part, case, expected=600.0) if each is not None]
        if not all(each.is_right for each in found):
            raise AssertionError(f"{part} {name}: an output is wrong")
        if isinstance(case, PipedCase):
            assert max(each.blocks for each in found) == math.ceil(BLOCKS / case.stages), "stages are not equal"
        off.append(found[0].seconds / case.law - 1)
        times = (
            f"{case.law:.3f} | {found[0].seconds:.3f} | {off[-1]:+.1%} | {max(each.processor for each in found):.3f}"
        )
        rows.append(f"| {name}{_more(case)} | {times} |")
        print(rows[-1], file=sys.stderr, flush=True)
    count = getattr(cases[0][1], "passes", None) or cases[0][1].steps
    within = sum(abs(each) <= LIMITS[part] for each in off)
    yield TEXTS[part].format(count=count)
    yield f"{within} of {len(off)} rows within {LIMITS[part]:.0%}, worst {max(off, key=abs):+.1%}."
    yield ""
    head = f"| {HEADS[part]} | law, s | measured, s | off | processor, s |"
    yield from (head, "|" + "---|" * (head.count("|") - 1), *rows)


def _more(case: object) -> str:
    if isinstance(case, ShardedCase):
        return f" | {case.seconds_without_overlap:.3f}"
    return f" | {case.step:.3f}" if isinstance(case, PipedCase) else ""


def _load() -> str:
    one, *_ = os.getloadavg()
    return f"Load of the machine before: {one:.1f} on {os.cpu_count()} cores."


CASES: dict[str, Callable[[float], Iterator[tuple[str, object]]]] = {
    "sharded": sharded_cases,
    "stages": stage_cases,
    "piped": piped_cases,
}

if __name__ == "__main__":
    main()
