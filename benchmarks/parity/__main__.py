"""How far whole pipelines in bands are from the same pipelines in one process: final latents, every plan.

    python -m benchmarks.parity --write docs/figures/parity.md
    python -m benchmarks.parity embedded sdxl

Tiny pipelines with random weights under which every exchange matters, and the embedded model, fp32, CPU. Every cell is
the norm of the difference over the norm of one process's latents, worst over the sizes; "alone" is the negative
control, patch=2 with the exchange switched off. Exit code 1 if a cell is above 1e-5 or below 100 dB, or a control is
not wrong.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.page import write_page
from benchmarks.parity import parsed

LIMIT, MIN_DB, CONTROL = 1e-5, 100.0, 1e-2
PLANS = (
    ("patch=2", True),
    ("patch=3", True),
    ("patch=4", True),
    ("cfg=2,patch=2", True),
    ("patch=2", False),
    ("patch=3", False),
    ("patch=4", False),
)
SIZES = ((128, 128), (136, 168))  # pixels; the second gives bands that differ, and no multiple of the stride
HEAD = [
    "| pipeline | scheduler | "
    + " | ".join(f"{plan}{'' if guided else ', no CFG'}" for plan, guided in PLANS)
    + " | alone | least PSNR |",
    "|" + "---|" * (len(PLANS) + 4),
]


def cases(scheduler: str, steps: int) -> list[Any]:
    """All calls of one pipeline with one scheduler, in the order of PLANS and SIZES."""
    from tests.exact.pipelines import Case

    found = []
    for plan, guided in PLANS:
        for size in SIZES:
            control = plan == "patch=2" and guided and size == SIZES[0]
            found.append(Case(plan=plan, scheduler=scheduler, guided=guided, size=size, steps=steps, control=control))
    return found


def rows(pool: Any, names: Sequence[str], steps: int) -> Iterator[tuple[str, bool]]:
    """One row of the table for each pipeline and scheduler, and whether it keeps the promise."""
    from tests.exact.test_pipelines import SCHEDULERS

    for name in names:
        with tempfile.TemporaryDirectory() as verifications:
            for scheduler in SCHEDULERS:
                arguments = (name, cases(scheduler, steps), verifications)
                found = pool.call("run", "tests.exact.pipelines:compared", 4, "auto", arguments)[0]
                yield _row(name, scheduler, found)


def _row(name: str, scheduler: str, found: Sequence[Any]) -> tuple[str, bool]:
    count = len(SIZES)
    errors = [max(each.relative_error for each in found[i : i + count]) for i in range(0, len(found), count)]
    (control,) = (each.control_error for each in found if each.control_error is not None)
    psnr = min(each.psnr_db for each in found)
    good = max(errors) <= LIMIT and psnr >= MIN_DB and control >= CONTROL
    cells = " | ".join(f"{error:.1e}" for error in errors)
    return f"| {name} | {scheduler} | {cells} | {control:.2f} | {psnr:.0f} dB |", good


def main() -> int:
    """Print the table."""
    from patchpar.launch.local import LocalExecutor
    from tests.exact.test_pipelines import NAMES

    options = parsed(__doc__, NAMES)
    lead = [
        "# Parity with one process",
        "",
        f"Relative error of the final latents, fp32, {options.steps} steps, worst of images of "
        + " and ".join(f"{height} x {width}" for height, width in SIZES)
        + " pixels; `alone`: two bands without the exchange. The guarantee is 1e-5 and 100 dB.",
        "",
        *HEAD,
    ]
    print("\n".join(lead), flush=True)
    lines, kept = lead, True
    with LocalExecutor(["cpu"] * 4, "tests.ranks:Ranks", deadline=600.0, preload=["tests.tiny"]) as pool:
        for line, good in rows(pool, options.names, options.steps):
            print(line, flush=True)
            lines, kept = [*lines, line], kept and good
    if options.write:
        write_page("\n".join([*lines, ""]), options.write)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
