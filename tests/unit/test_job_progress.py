"""A job in one line: how far it is, where, and how it has ended."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from patchpar.errors import WorkerDied
from patchpar.pipeline.job_progress import JobProgress, job_in_words


def ended(error: Exception | None) -> Future[Any]:
    future: Future[Any] = Future()
    if error is None:
        future.set_result("an image")
    else:
        future.set_exception(error)
    return future


@pytest.mark.parametrize(
    ("future", "progress", "ranks", "says"),
    [
        (Future(), JobProgress(), (), "no step yet"),
        (Future(), JobProgress(step=3, steps=25), (1, 0), "step 3 of 25 on ranks 1, 0"),
        (ended(None), JobProgress(step=4, steps=4), (2,), "ended: step 4 of 4 on rank 2"),
        (ended(WorkerDied("gone")), JobProgress(), (2,), "ended by WorkerDied: no step yet on rank 2"),
    ],
)
def test_words(future: Future[Any], progress: JobProgress, ranks: tuple[int, ...], says: str) -> None:
    assert job_in_words(future, progress, ranks) == says
