"""Every transformer and UNet class, one after the other in a process of its own: its ranks are threads of one core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import diffusers
import torch

from .report import Report, examine
from .subjects import Subject, subjects


@contextmanager
def class_reports(chosen: Sequence[Subject], ranks: Sequence[int]) -> Iterator[Callable[[], list[Report]]]:
    """Try every mode of each subject on so many ranks, from now on; what is given waits for the reports, in order.

    Whatever ends the block ends the process after the subject that it is at.
    """
    process = ProcessPoolExecutor(1, get_context("spawn"), initializer=_prepare)
    try:
        under_way = [process.submit(_examined, (each.name, each.family), tuple(ranks)) for each in chosen]
        yield lambda: [each.result() for each in under_way]
    finally:
        process.shutdown(cancel_futures=True)


def _prepare() -> None:
    torch.set_num_threads(1)  # the nets are so small that a second thread costs more than it brings
    diffusers.logging.set_verbosity_error()


def _examined(key: tuple[str, str], ranks: Sequence[int]) -> Report:
    (subject,) = [each for each in subjects() if (each.name, each.family) == key]
    report = examine(subject, ranks)
    sys.stderr.write(f"{subject.name} ({subject.family}): {report.split}\n")
    return report
