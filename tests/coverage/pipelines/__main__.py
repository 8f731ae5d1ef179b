"""Try every pipeline of diffusers that can be made in small under several plans: the second half of docs/coverage.md.

python -m tests.coverage.pipelines                  all of them; minutes on two cores
python -m tests.coverage.pipelines --only Flux      some, told instead of written
python -m tests.coverage.pipelines --kept build/zoo keep each report there, and do not try again what is there
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from patchpar.launch.local import LocalExecutor
from tests.coverage.page import PAGE

from .kept import KeptReports
from .report import Report, left_out, replaced, section
from .trial import PLANS, RANKS, Outcome, merged
from .zoo import ZOO

DEADLINE = 150.0


def main() -> int:
    """1 where anything is wrong or failed, 2 where there is nothing to try."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage.pipelines", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="pipelines with this in their name")
    parser.add_argument("--kept", type=Path, metavar="FOLDER", help="reports of earlier runs, and where this one's go")
    asked = parser.parse_args()
    names = [name for name in ZOO if not asked.only or any(part in name for part in asked.only)]
    if not names:
        sys.stderr.write(f"no pipeline has {' or '.join(asked.only)} in its name\n")
        return 2
    with (
        tempfile.TemporaryDirectory() as verdicts,
        LocalExecutor(["cpu"] * RANKS, "tests.ranks:Ranks", deadline=DEADLINE, preload=["tests.tiny"]) as pool,
    ):
        kept = KeptReports(asked.kept)
        reports = [kept.read(name) or kept.write(examine(pool, name, verdicts)) for name in names]
    text = section(reports, left_out())
    if len(names) == len(ZOO):
        PAGE.write_text(replaced(PAGE.read_text(), text))
    else:
        sys.stdout.write(text)
    failed = [f"{each.name}: {failure}\n" for each in reports for failure in each.failures]
    sys.stderr.write("".join(failed))
    return 1 if failed else 0


def examine(pool: LocalExecutor, name: str, verdicts: str) -> Report:
    """Every plan of one pipeline on a pool of `RANKS` ranks."""
    entry = ZOO[name]
    plans = [plan for plan in PLANS if entry.prompts or not plan.startswith("data")]
    outcomes = tuple(_outcome(pool, name, plan, verdicts) for plan in plans)
    sys.stderr.write(f"{name}: {', '.join(f'{each.plan} {each.verdict}' for each in outcomes)}\n")
    return Report(name=name, guidance=entry.guidance, outcomes=outcomes)


def _outcome(pool: LocalExecutor, name: str, plan: str, verdicts: str) -> Outcome:
    """A call for each plan, so that one that ends the workers costs the others nothing."""
    arguments = (name, [plan], verdicts)
    try:
        of_ranks = pool.call("run", "tests.coverage.pipelines.trial:examined", RANKS, "auto", arguments)
    except Exception as error:  # noqa: BLE001 - whatever ends the workers is what this plan gives
        return Outcome(plan=plan, verdict="failed", said=f"{type(error).__name__}: {error}".splitlines()[0])
    return merged([each for found in of_ranks for each in found])


if __name__ == "__main__":
    sys.exit(main())
