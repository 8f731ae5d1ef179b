"""Every pipeline of the zoo under every plan, on pools of ranks that work at the same time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from patchpar.launch.local import LocalExecutor

from .kept import KeptReports
from .report import Report
from .trial import RANKS, Outcome, outcomes_of
from .zoo import ZOO

DEADLINE = 150.0
POOLS = 2
"""Ranks of a pool wait for one another, and those of a second one work meanwhile."""


def pipeline_reports(names: Sequence[str], kept: KeptReports) -> list[Report]:
    """In the order of the names. Each pool has verdicts of its own, which no other process writes meanwhile."""
    missing = [name for name in names if kept.read(name) is None]
    idle: SimpleQueue[tuple[LocalExecutor, str]] = SimpleQueue()

    def report(name: str) -> Report:
        known = kept.read(name)
        if known is not None:
            return known
        pool, verifications = idle.get()
        try:
            return kept.write(examine(pool, name, verifications))
        finally:
            idle.put((pool, verifications))

    with ExitStack() as open_pools:
        for _ in range(min(POOLS, len(missing))):
            verifications = open_pools.enter_context(tempfile.TemporaryDirectory())
            ranks = LocalExecutor(["cpu"] * RANKS, "tests.ranks:Ranks", deadline=DEADLINE, preload=["tests.tiny"])
            idle.put((open_pools.enter_context(ranks), verifications))
        with ThreadPoolExecutor(POOLS) as threads:
            return list(threads.map(report, names))


def examine(pool: LocalExecutor, name: str, verifications: str) -> Report:
    """Every plan of one pipeline on a pool of `RANKS` ranks."""
    entry = ZOO[name]
    outcomes = _outcomes(pool, name, entry.plans, verifications)
    sys.stderr.write(f"{name}: {', '.join(f'{each.plan} {each.status}' for each in outcomes)}\n")
    return Report(name=name, guidance=entry.guidance, outcomes=outcomes)


def _outcomes(pool: LocalExecutor, name: str, plans: Sequence[str], verifications: str) -> tuple[Outcome, ...]:
    """One call for all plans; where the workers end in it, a call for each, so that the others are tried."""
    try:
        of_ranks = pool.call(
            "run", "benchmarks.coverage.pipelines.trial:examined", RANKS, "auto", (name, plans, verifications)
        )
    except Exception as error:  # noqa: BLE001 - whatever ends the workers is what this plan gives
        if len(plans) > 1:
            return tuple(each for plan in plans for each in _outcomes(pool, name, [plan], verifications))
        return (Outcome(plan=plans[0], status="failed", message=f"{type(error).__name__}: {error}".splitlines()[0]),)
    return outcomes_of(of_ranks, plans)
