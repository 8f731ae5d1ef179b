"""A stream of images on two ranks of one thread each against one rank of one thread, in turn, in one run.

    python -m benchmarks.stream.images --write docs/figures/stream-images.md

Ranks generate whole images in turn. Images of both ways are compared bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.page import publish
from benchmarks.stream.image_ranks import WARM, Case, in_order
from patchpar.launch.local import LocalExecutor


def compare(case: Case, repeats: int) -> list[str]:
    """A line of the table: both ways `repeats` times, in turn."""
    from patchpar.models.files import resolve_model

    folder, options, _ = resolve_model(case.model, {})
    ratios, gaps, same = list[float](), ([], []), True
    with LocalExecutor(["cpu", "cpu"], "benchmarks.stream.image_ranks:Bench", deadline=600.0) as pool:
        pool.call("load", folder, options, expected=600.0)
        for _ in range(repeats):
            one, two = (in_order(chain(*pool.call("stream", case, ranks, expected=3600.0))) for ranks in (1, 2))
            ratios.append(one.gap / two.gap)
            gaps[0].append(one.gap)
            gaps[1].append(two.gap)
            same = same and all(np.array_equal(a, b) for a, b in zip(one.images, two.images, strict=True))
    first, second = (1 / statistics.median(values) for values in gaps)
    return [
        f"| {case.model}, {case.size} x {case.size}, {case.steps} steps, guidance {case.guidance:g} | {first:.3f} | "
        f"{second:.3f} | {statistics.median(ratios):.2f}x | {'yes' if same else '**no**'} |"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder, a hub id, or a model in the package (embedded)")
    parser.add_argument("--size", type=int, default=256, help="pixels of both sides (256)")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps (4)")
    parser.add_argument("--guidance", type=float, default=5.0, help="guidance scale (5)")
    parser.add_argument("--images", type=int, default=16, help=f"of which first and last {WARM} do not count (16)")
    parser.add_argument("--repeats", type=int, default=5, help="streams each way (5)")
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    case = Case(
        model=options.model,
        size=options.size,
        steps=options.steps,
        guidance=options.guidance,
        images=options.images,
    )
    lines = [
        "# A stream of images on two ranks",
        "",
        f"Images per second, ranks with one thread each; medians of {options.repeats} streams of {options.images} "
        f"images each way, in turn, the first and last {WARM} not counted. By benchmarks/stream/images.py.",
        "",
        "| | one rank | two ranks | faster | equal bit for bit |",
        "|---|---|---|---|---|",
        *compare(case, options.repeats),
    ]
    publish(lines, options.write)


if __name__ == "__main__":
    main()
