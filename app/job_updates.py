"""Polls a job for a page: no handler blocks on workers, so any number of pages can watch."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from .job_queue import Job, JobView

POLL_SECONDS = 0.05


async def updates_of(job: Job | None, show: Callable[[JobView | None], Any]) -> AsyncIterator[Any]:
    """`show` of the job's view after every change, until the job ends. Without a job: once, with None."""
    if job is None:
        yield show(None)
        return
    seen = -1
    while True:
        view = job.view
        if view.version != seen:
            seen = view.version
            yield show(view)
        if view.is_over:
            return
        await asyncio.sleep(POLL_SECONDS)
