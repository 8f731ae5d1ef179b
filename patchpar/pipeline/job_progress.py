"""How far a job is, as numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """Finished denoising steps of a call, and how many it has; 0 of 0 before the first."""

    step: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"step {self.step} of {self.steps}" if self.steps else "no step yet"


def job_in_words(future: Future[Any], progress: JobProgress, ranks: Sequence[int]) -> str:
    """Return the state of a job, on the ranks of its latest attempt, in one line. Does not wait."""
    where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    if not future.done():
        return f"{progress}{where}"
    error = future.exception()
    ending = "ended" if error is None else f"ended by {type(error).__name__}"
    return f"{ending}: {progress}{where}"
