"""Seconds of a step of piped stages over a link of some latency, beside max(c, N (c / M + latency)).

    python -m benchmarks.piped                       2 and 4 stages
    python -m benchmarks.piped --page docs/figures/piped.md

Blocks sleep in place of computing, so that stages overlap on any number of cores; the link is delayed. What is measured
is the difference of two runs, of which one has more steps: so the time until the first piece is at the last stage does
not count. With "waits" each call waits for its prediction, as where something reads it at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.page import publish
from benchmarks.piped.ranks import BLOCKS
from patchpar.launch.local import LocalExecutor

STEPS = (4, 12)
CASES = ((2, 2, 0.0), (2, 3, 0.02), (2, 4, 0.0), (2, 4, 0.02), (4, 4, 0.0), (4, 5, 0.01), (4, 6, 0.01))
"""Stages, pieces, seconds of latency."""


def formula(stages: int, pieces: int, latency: float, busy: float, *, waits: bool) -> float:
    """Seconds of a step. `busy`: of the busiest stage in a step."""
    piece = busy / pieces
    if waits:
        return stages * (piece + latency) + (pieces - 1) * piece
    return max(busy, stages * (piece + latency))


def rows(seconds: float) -> Iterator[str]:
    """A line of the table for each case."""
    for stages in sorted({case[0] for case in CASES}):
        with LocalExecutor(
            ["cpu"] * stages, "benchmarks.piped.ranks:Stage", preload=("patchpar.pipeline.runner",)
        ) as ranks:
            for _, pieces, latency in (case for case in CASES if case[0] == stages):
                busy = BLOCKS // stages * seconds
                cells = []
                for waits in (False, True):
                    few, many = (
                        max(ranks.call("measure", pieces, latency, seconds, steps, waits, expected=300.0))
                        for steps in STEPS
                    )
                    step = (many - few) / (STEPS[1] - STEPS[0])
                    wanted = formula(stages, pieces, latency, busy, waits=waits)
                    cells += [f"{1e3 * step:.0f}", f"{1e3 * wanted:.0f}", f"{step / wanted:.2f}"]
                alone = stages * busy + (stages - 1) * latency
                yield f"| {stages} | {pieces} | {1e3 * latency:.0f} | {1e3 * alone:.0f} | {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print or write a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.1, help="that a block sleeps for all tokens")
    parser.add_argument("--page", type=Path, help="where to write the page")
    options = parser.parse_args()
    names = "stages | pieces | latency, ms | exact, ms | step, ms | formula | ratio | waits, ms | formula | ratio"
    head = [
        "# Step time of piped stages",
        "",
        f"A transformer of {BLOCKS} blocks, each of which sleeps {1e3 * options.seconds:.0f} ms in place of computing;",
        "CPU workers, a delayed link. `exact`: of stages one after the other. `waits`: each call waits for its",
        "prediction. Measured by `python -m benchmarks.piped`.",
        "",
        f"| {names} |",
        "|" + "---|" * 10,
    ]
    publish([*head, *rows(options.seconds)], options.page)


if __name__ == "__main__":
    main()
