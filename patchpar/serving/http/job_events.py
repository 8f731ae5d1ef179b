"""What happens to a job, as server-sent events: its events as they come, heartbeats meanwhile, and its end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from patchpar.serving.http.event_stream import HEARTBEAT, HEARTBEAT_SECONDS
from patchpar.serving.job import Job


async def changes_of(job: Job) -> AsyncIterator[bool]:
    """Yield True after each change of a job, and False after seconds without one. Ends with the job."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(changed.set)

    with job.listening(wake):
        while True:
            changed.clear()
            is_over = job.outcome.done()  # before the last look at its events, not after it
            yield True
            if is_over:
                return
            while not await _within(changed, HEARTBEAT_SECONDS):
                yield False


async def events_of(job: Job, render: Callable[[Any], bytes]) -> AsyncIterator[bytes]:
    """Yield each event of a job as `render` writes it, in a thread since it may encode an image; then return."""
    sent = 0
    async for is_changed in changes_of(job):
        if not is_changed:
            yield HEARTBEAT
        for event in job.events(sent):
            sent += 1
            yield await asyncio.to_thread(render, event)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except (TimeoutError, asyncio.TimeoutError):  # two classes in Python 3.10
        return False
    return True
