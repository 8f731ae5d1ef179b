"""A page that looks at its job: nothing waits for workers, so that any number of pages may look at once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from .jobs import Job, JobView

LOOK_SECONDS = 0.05


async def looked_at(job: Job | None, show: Callable[[JobView | None], Any]) -> AsyncIterator[Any]:
    """What `show` makes of the job, whenever it has changed, until it is over. Without a job: once."""
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
        await asyncio.sleep(LOOK_SECONDS)
