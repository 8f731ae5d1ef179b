"""Waits with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.job_queue import Job, JobView


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"not in {seconds:g} s: {what}"
        time.sleep(0.01)


def over(job: Job, seconds: float = 30.0) -> JobView:
    until(lambda: job.view.is_over, f"the job to end, which is {job.view.state}", seconds)
    return job.view
