"""Every transformer and UNet class, in workers that each use one core: the ranks of a class are threads of one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue

import diffusers

from patchpar.launch.local import LocalExecutor
from tests.ranks import PoolRank

from .report import Report, examine
from .subjects import Subject, subjects

DEADLINE = 150.0
WORKERS = 2
"""As many as keep both cores busy until the pipelines, which are tried at the same time, come to their end as well."""


@contextmanager
def class_reports(chosen: Sequence[Subject], ranks: Sequence[int]) -> Iterator[Callable[[], list[Report]]]:
    """Try every mode of each subject on so many ranks, from now on; what is given waits for the reports, in order.

    Whatever ends the block ends the workers.
    """
    idle: SimpleQueue[LocalExecutor] = SimpleQueue()

    def report(subject: Subject) -> Report:
        worker, arguments = idle.get(), (subject.name, subject.family, tuple(ranks))
        try:
            (found,) = worker.call("run", "benchmarks.coverage.classes:examined", 1, "auto", arguments)
        finally:
            idle.put(worker)
        sys.stderr.write(f"{subject.name} ({subject.family}): {found.split}\n")
        return found

    with ExitStack() as open_workers:
        for _ in range(min(WORKERS, len(chosen))):
            worker = LocalExecutor(["cpu"], "tests.ranks:Ranks", deadline=DEADLINE, preload=["tests.tiny"])
            idle.put(open_workers.enter_context(worker))
        threads = ThreadPoolExecutor(WORKERS)
        open_workers.callback(threads.shutdown, wait=False, cancel_futures=True)
        under_way = [threads.submit(report, each) for each in chosen]
        yield lambda: [each.result() for each in under_way]


def examined(this: PoolRank, name: str, family: str, ranks: Sequence[int]) -> Report:
    """Every mode of one subject, in the worker."""
    diffusers.logging.set_verbosity_error()
    (subject,) = [each for each in subjects() if (each.name, each.family) == (name, family)]
    return examine(subject, ranks)
