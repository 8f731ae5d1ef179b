"""Every transformer and UNet class, one after the other in a worker of its own: its ranks are threads of one core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import diffusers

from patchpar.launch.local import LocalExecutor
from tests.ranks import Place

from .report import Report, examine
from .subjects import Subject, subjects

DEADLINE = 150.0


@contextmanager
def class_reports(chosen: Sequence[Subject], ranks: Sequence[int]) -> Iterator[Callable[[], list[Report]]]:
    """Try every mode of each subject on so many ranks, from now on; what is given waits for the reports, in order.

    Whatever ends the block ends the worker.
    """
    with LocalExecutor(["cpu"], "tests.ranks:Ranks", deadline=DEADLINE, preload=["tests.tiny"]) as worker:

        def report(subject: Subject) -> Report:
            arguments = (subject.name, subject.family, tuple(ranks))
            (found,) = worker.call("run", "benchmarks.coverage.classes:examined", 1, "auto", arguments)
            sys.stderr.write(f"{subject.name} ({subject.family}): {found.split}\n")
            return found

        thread = ThreadPoolExecutor(1)
        try:
            under_way = [thread.submit(report, each) for each in chosen]
            yield lambda: [each.result() for each in under_way]
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


def examined(place: Place, name: str, family: str, ranks: Sequence[int]) -> Report:
    """Every mode of one subject, in the worker."""
    diffusers.logging.set_verbosity_error()
    (subject,) = [each for each in subjects() if (each.name, each.family) == (name, family)]
    return examine(subject, ranks)
