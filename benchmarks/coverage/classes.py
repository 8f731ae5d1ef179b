"""Every transformer and UNet class, one after the other in a process of its own: its ranks are threads of one core."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import diffusers
import torch

from .report import Report, examine
from .subjects import Subject, subjects


def class_reports(chosen: Sequence[Subject], ranks: Sequence[int]) -> list[Report]:
    """Every mode of each subject on so many ranks, in the order of the subjects."""
    if not chosen:
        return []
    keys = [(each.name, each.family) for each in chosen]
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_prepare) as process:
        return list(process.map(_examined, keys, [tuple(ranks)] * len(keys)))


def _prepare() -> None:
    torch.set_num_threads(1)  # the nets are so small that a second thread costs more than it brings
    diffusers.logging.set_verbosity_error()


def _examined(key: tuple[str, str], ranks: Sequence[int]) -> Report:
    (subject,) = [each for each in subjects() if (each.name, each.family) == key]
    report = examine(subject, ranks)
    sys.stderr.write(f"{subject.name} ({subject.family}): {report.split}\n")
    return report
