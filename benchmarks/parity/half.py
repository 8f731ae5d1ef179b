"""In half precision: how far ranks are from one process, beside how far plain diffusers is from itself.

    python -m benchmarks.parity.half --write docs/figures/parity-half.md
    python -m benchmarks.parity.half sdxl

Rounding of a half format is as large as whatever changes the order of sums, so a figure says nothing by itself: it is
judged by what another batch size, or another kernel of attention, makes of the same call in plain diffusers, and by how
far both are from the same weights computed in fp32. Exit code 1 if ranks are much farther from those than one process.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.page import publish
from benchmarks.parity import parsed

NAMES = ("sd", "sdxl")
PLANS = ("patch=2", "patch=3", "cfg=2,patch=2")
SIZES = ((128, 128), (136, 168))
MOST = 1.5
"""How far ranks may be from the truth, in units of what one process is."""
HEAD = [
    "| pipeline | format | ranks beside one process | another batch | another kernel | ranks off | one process off |",
    "|---|---|---|---|---|---|---|",
]


def lead(steps: int) -> list[str]:
    """What stands above the table."""
    sizes = " and ".join(f"{height} x {width}" for height, width in SIZES)
    return [
        "# Parity in half precision",
        "",
        f"Relative differences of final latents, DDIM, {steps} steps, CPU, worst of {', '.join(PLANS)} and of",
        f"images of {sizes} pixels. `ranks beside one process`: this package's. `another batch`,",
        "`another kernel`: plain diffusers beside itself, in a batch of two, and with torch's plain kernel of",
        "attention (`SDPBackend.MATH`) in place of the fused one. `off`: how far ranks, and one process of plain",
        "diffusers, are from the same half weights computed in fp32. The guarantee is that ranks are no farther off",
        f"than {MOST} times one process. Two results that are each off by as much, in directions of their own, are",
        "1.4 times that apart. Measured",
        "by `python -m benchmarks.parity.half`, written with `--write docs/figures/parity-half.md`.",
        "",
        *HEAD,
    ]


def rows(pool: Any, names: Sequence[str], steps: int) -> Iterator[tuple[str, bool]]:
    """One row for each pipeline and format, and whether it keeps the promise."""
    from tests.exact.pipelines import Case

    cases = [Case(plan=plan, scheduler="DDIM", size=size, steps=steps) for plan in PLANS for size in SIZES]
    for name in (name for name in NAMES if name in names):
        for dtype in (torch.float16, torch.bfloat16):
            with tempfile.TemporaryDirectory() as verifications:
                found = pool.call(
                    "run", "tests.exact.pipelines:halved", 4, "auto", (name, dtype, cases, verifications)
                )[0]
            worst = {field: max(getattr(each, field) for each in found) for field in ("ours", "batched", "math")}
            off, plain = max(each.ours_off for each in found), max(each.plain_off for each in found)
            cells = " | ".join(f"{value:.1e}" for value in (*worst.values(), off, plain))
            yield f"| {name} | {str(dtype).removeprefix('torch.')} | {cells} |", off <= MOST * plain


def main() -> int:
    """Print the table, and write it."""
    from patchpar.launch.local import LocalExecutor

    options = parsed(__doc__, NAMES)
    lines, kept = lead(options.steps), True
    with LocalExecutor(["cpu"] * 4, "tests.ranks:Ranks", deadline=600.0, preload=["tests.tiny"]) as pool:
        for line, good in rows(pool, options.names, options.steps):
            print(line, file=sys.stderr, flush=True)
            lines, kept = [*lines, line], kept and good
    publish(lines, options.write)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
