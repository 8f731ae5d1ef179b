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

NAMES = ("sd", "sdxl", "flux", "sd3")
PLANS = ("patch=2", "patch=3", "cfg=2,patch=2")
SIZES = ((128, 128), (136, 168))
EVEN_SIZES = ((128, 128), (144, 176))
"""Of transformers, whose tokens are squares of latent pixels."""
TRANSFORMERS = ("flux", "sd3")
MOST = 1.5
"""How far ranks may be from the truth, in units of what one process is."""
OFF = ("ours_off", "plain_off")
HEAD = [
    "| pipeline | format | ranks beside one process | another batch | another kernel | ranks off | one process off "
    "| one step: ranks off | one step: one process off |",
    "|---|---|---|---|---|---|---|---|---|",
]


def lead(steps: int) -> list[str]:
    """What stands above the table."""
    sizes, even = (" and ".join(f"{height} x {width}" for height, width in each) for each in (SIZES, EVEN_SIZES))
    return [
        "# Parity in half precision",
        "",
        f"Relative differences of final latents, {steps} steps, DDIM or the flow matching of the pipeline, CPU, worst",
        f"of {', '.join(PLANS)} and of images of {sizes} pixels ({even} of transformers).",
        "`ranks beside one process`: this package's. `another batch`, `another kernel`: plain diffusers beside itself,",
        "in a batch of two, and with torch's plain kernel of attention (`SDPBackend.MATH`) in place of the fused one.",
        "`off`: how far ranks, and one process of plain diffusers, are from the same half weights computed in fp32;",
        "`one step`: the same after a single step without guidance, so of a single forward. The guarantee is that",
        f"ranks are no farther off than {MOST} times one process. Two results that are each off by as much, in",
        "directions of their own, are 1.4 times that apart. Where the error comes from: [rounding](rounding.md).",
        "Measured by `python -m benchmarks.parity.half`, written with `--write docs/figures/parity-half.md`.",
        "",
        *HEAD,
    ]


def cases_of(name: str, steps: int) -> list[Any]:
    """The calls of a pipeline, all steps with guidance first, then one step without."""
    from tests.exact.pipelines import Case

    scheduler = "own" if name in TRANSFORMERS else "DDIM"
    plans = [plan for plan in PLANS if not plan.startswith("cfg")]
    calls = [(plan, True, steps) for plan in PLANS] + [(plan, False, 1) for plan in plans]
    return [
        Case(plan=plan, scheduler=scheduler, size=size, steps=count, guided=guided)
        for plan, guided, count in calls
        for size in (EVEN_SIZES if name in TRANSFORMERS else SIZES)
    ]


def rows(pool: Any, names: Sequence[str], steps: int) -> Iterator[tuple[str, bool]]:
    """One row for each pipeline and format, and whether it keeps the promise."""
    for name in (name for name in NAMES if name in names):
        cases = cases_of(name, steps)
        whole = sum(case.guided for case in cases)
        for dtype in (torch.float16, torch.bfloat16):
            with tempfile.TemporaryDirectory() as verifications:
                arguments = (name, dtype, cases, verifications)
                found = pool.call("run", "tests.exact.pipelines:halved", 4, "auto", arguments)[0]
            after, once = found[:whole], found[whole:]
            worst = [max(getattr(each, field) for each in after) for field in ("ours", "batched", "math")]
            off = [max(getattr(each, field) for each in part) for part in (after, once) for field in OFF]
            cells = " | ".join(f"{value:.1e}" for value in (*worst, *off))
            good = off[0] <= MOST * off[1] and off[2] <= MOST * off[3]
            yield f"| {name} | {str(dtype).removeprefix('torch.')} | {cells} |", good


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
