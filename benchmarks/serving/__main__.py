"""What a server costs, and what its policies are worth: a page of figures.

python -m benchmarks.serving --write docs/figures/serving.md
python -m benchmarks.serving --requests 1 --runs 20           # what a request costs: on an idle machine
python -m benchmarks.serving --no-overhead --requests 200      # the simulated mix only: the same on any machine
python -m benchmarks.serving --no-overhead --real 40           # also a real mix on two workers: on an idle machine
python -m benchmarks.serving --no-overhead --kills 10          # also how soon ranks go on after a kill: likewise
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.page import publish_section
from benchmarks.serving.mix import DEVICES, RESUME_SECONDS, SLACK, SMALL_PART, Kind, kinds, outcomes
from benchmarks.serving.overhead import Overhead, measure
from benchmarks.serving.real_mix import LARGE, LOAD, SMALL, RealOutcome, real_outcomes
from benchmarks.serving.regroup import measure_regroups, regroup_lines

OPENING = "# Serving\n\nWritten by `python -m benchmarks.serving` ([serve images](../howto/serve.md)).\n"


def mix_lines(count: int) -> Iterator[str]:
    """The section of the simulated mix."""
    small, large = kinds()
    yield (
        f"**Simulated**: {count} requests on {DEVICES} devices, {SMALL_PART:.0%} small and the rest large, that arrive "
        "at random. Their costs stand for those of two sizes: the [predicted ones](gpu-predict.md) of two models on an "
        f"H100 SXM, exact. Each has a deadline of {SLACK[0]:g} to {SLACK[1]:g} times its seconds on one device. Load 1 "
        "is what all devices can do if each has a request of its own. Where requests can be suspended, going on again "
        f"costs {RESUME_SECONDS:g} s."
    )
    yield from ("", "| request | " + " | ".join(f"step on {degree}, ms" for degree in (1, 2, 4, 8)) + " |")
    yield "|---|---|---|---|---|"
    for kind in (small, large):
        yield f"| {kind.name} | " + " | ".join(_milliseconds(kind, degree) for degree in (1, 2, 4, 8)) + " |"
    yield from ("", "| load | policy | deadlines met | requests per minute | mean seconds | suspensions |")
    yield "|---|---|---|---|---|---|"
    for each in outcomes(count):
        yield (
            f"| {each.load:g} | {each.policy} | {each.met:.0%} | {each.per_minute:.0f} | {each.seconds:.2f} | "
            f"{each.suspensions} |"
        )


def _milliseconds(kind: Kind, degree: int) -> str:
    return f"{1000 * kind.costs.steps[degree]:.1f}"


def overhead_lines(found: Overhead, runs: int) -> Iterator[str]:
    """The section of the measured overhead."""
    yield (
        f"The embedded model at 128 x 128 on one CPU device, {found.steps} steps, {runs} requests over HTTP on an idle "
        "server in turn with the same calls in Python (`pipe.submit`). Beside the call: HTTP, checks, queue, encoding "
        "of the image as PNG. To the first denoiser call the prompt is encoded too."
    )
    yield from ("", "| | median, ms | worst, ms |", "|---|---|---|")
    yield f"| call in Python | {1000 * found.call:.1f} | |"
    beside = f"{1000 * found.beside:.1f} ({found.ratio:.1%})"
    yield f"| a request takes longer by | {beside} | {1000 * found.worst_beside:.1f} |"
    yield f"| from a request to its first denoiser call | {1000 * found.first:.1f} | {1000 * found.worst_first:.1f} |"
    yield f"| the same of the call in Python | {1000 * found.plain_first:.1f} | |"
    yield f"| in the queue | {1000 * found.queued:.2f} | {1000 * found.worst_queued:.2f} |"


def real_lines(found: Iterable[tuple[RealOutcome, RealOutcome]], count: int) -> Iterator[str]:
    """The section of the real mix."""
    yield (
        f"{count} requests for images of the embedded model on two CPU workers, {SMALL_PART:.0%} at {SMALL.side} x "
        f"{SMALL.side} with {SMALL.steps} steps and the rest at {LARGE.side} x {LARGE.side} with {LARGE.steps}, that "
        f"arrive at random, at a load of {LOAD:g}. All policies get the same requests: with deadlines as above, and "
        "without any. One that is refused, since its deadline cannot be met, has missed it."
    )
    yield from (
        "",
        "| policy | deadlines met | requests per minute, without deadlines | mean seconds |",
        "|---|---|---|---|",
    )
    for bound, free in found:
        yield f"| {bound.policy} | {bound.met:.0%} | {free.per_minute:.1f} | {free.seconds:.2f} |"


def main() -> None:
    """Measure, simulate, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of the simulated mix")
    parser.add_argument("--runs", type=int, default=20, help="measured requests")
    parser.add_argument("--no-overhead", action="store_true", help="leave out what is measured")
    parser.add_argument("--real", type=int, default=0, help="requests of the real mix on two CPU workers")
    parser.add_argument("--kills", type=int, default=0, help="times that one of three CPU workers is killed")
    parser.add_argument("--write", type=Path, help="file of the page, which keeps sections that are not measured now")
    asked = parser.parse_args()

    def publish(heading: str, lines: Iterable[str]) -> None:
        publish_section(OPENING, heading, lines, asked.write)

    if not asked.no_overhead:
        publish("Beside the call, measured", overhead_lines(measure(asked.runs), asked.runs))
    publish("A mix of requests, simulated", mix_lines(asked.requests))
    if asked.real:
        publish("A mix of requests, measured", real_lines(real_outcomes(asked.real), asked.real))
    if asked.kills:
        publish("After a lost worker, measured", regroup_lines(measure_regroups(asked.kills)))


if __name__ == "__main__":
    main()
