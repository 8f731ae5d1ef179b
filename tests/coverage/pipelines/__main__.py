"""Try every pipeline of diffusers that can be made in small under several plans: the second half of docs/coverage.md.

python -m tests.coverage.pipelines                  all of them; minutes on two cores
python -m tests.coverage.pipelines --only Flux      some, told instead of written
python -m tests.coverage.pipelines --kept build/zoo keep each report there, and do not try again what is there
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from patchpar.launch.local import LocalExecutor
from tests.coverage.page import PAGE

from .kept import KeptReports
from .report import Report, left_out, replaced, section
from .trial import RANKS, Outcome, outcomes_of
from .zoo import ZOO

DEADLINE = 150.0
POOLS = 2
"""Pools of ranks at work at the same time: ranks of one wait for one another, and a second fills two cores."""


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
    reports = _reports(names, KeptReports(asked.kept))
    text = section(reports, left_out())
    if len(names) == len(ZOO):
        PAGE.write_text(replaced(PAGE.read_text(), text))
    else:
        sys.stdout.write(text)
    failed = [f"{each.name}: {failure}\n" for each in reports for failure in each.failures]
    sys.stderr.write("".join(failed))
    return 1 if failed else 0


def _reports(names: Sequence[str], kept: KeptReports) -> list[Report]:
    """In the order of the names. Each pool has verdicts of its own, which no other process writes meanwhile."""
    idle: SimpleQueue[tuple[LocalExecutor, str]] = SimpleQueue()

    def report(name: str) -> Report:
        known = kept.read(name)
        if known is not None:
            return known
        pool, verdicts = idle.get()
        try:
            return kept.write(examine(pool, name, verdicts))
        finally:
            idle.put((pool, verdicts))

    with ExitStack() as open_pools:
        for _ in range(POOLS):
            verdicts = open_pools.enter_context(tempfile.TemporaryDirectory())
            ranks = LocalExecutor(["cpu"] * RANKS, "tests.ranks:Ranks", deadline=DEADLINE, preload=["tests.tiny"])
            idle.put((open_pools.enter_context(ranks), verdicts))
        with ThreadPoolExecutor(POOLS) as threads:
            return list(threads.map(report, names))


def examine(pool: LocalExecutor, name: str, verdicts: str) -> Report:
    """Every plan of one pipeline on a pool of `RANKS` ranks."""
    entry = ZOO[name]
    outcomes = _outcomes(pool, name, entry.plans, verdicts)
    sys.stderr.write(f"{name}: {', '.join(f'{each.plan} {each.verdict}' for each in outcomes)}\n")
    return Report(name=name, guidance=entry.guidance, outcomes=outcomes)


def _outcomes(pool: LocalExecutor, name: str, plans: Sequence[str], verdicts: str) -> tuple[Outcome, ...]:
    """One call for all plans; where the workers end in it, a call for each, so that the others are tried."""
    try:
        of_ranks = pool.call("run", "tests.coverage.pipelines.trial:examined", RANKS, "auto", (name, plans, verdicts))
    except Exception as error:  # noqa: BLE001 - whatever ends the workers is what this plan gives
        if len(plans) > 1:
            return tuple(each for plan in plans for each in _outcomes(pool, name, [plan], verdicts))
        return (Outcome(plan=plans[0], verdict="failed", said=f"{type(error).__name__}: {error}".splitlines()[0]),)
    return outcomes_of(of_ranks, plans)


if __name__ == "__main__":
    sys.exit(main())
