"""Follows a job for a page: no handler blocks on workers, so any number of pages can watch."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import gradio as gr

from .blocks import Preview
from .job_queue import Job, JobView

BEGIN_SECONDS = 0.03
"""How long a page waits for its first update: a job that need not wait has sent its call to the workers by then, which
the update, made in the same process, would hold up."""
PREVIEW_SECONDS = 0.05
"""How long the number of a step waits for its preview, so that a page gets both in one update."""


async def updates_of(job: Job | None, show: Callable[[JobView | None], Any]) -> AsyncIterator[Any]:
    """`show` of the job's view after every change, until the job ends. Without a job: once, with None."""
    if job is None:
        yield show(None)
        return
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended before the job
            loop.call_soon_threadsafe(changed.set)

    with job.listening(wake):
        if not job.view.is_over:
            await asyncio.sleep(BEGIN_SECONDS)
            changed.clear()
        seen = job.view
        yield show(seen)
        while not seen.is_over:
            await changed.wait()
            changed.clear()
            if job.view.version == seen.version:
                continue
            if _lacks_preview(job.view, seen):
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), PREVIEW_SECONDS)
            seen = job.view
            yield show(seen)


async def changes_of(updates: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The updates of several outputs, each without those that are as in the one before: `gr.skip()` stands for them."""
    last: Any = None
    async for update in updates:
        if isinstance(last, tuple):
            yield tuple(gr.skip() if _is_same(*pair) else pair[1] for pair in zip(last, update, strict=True))
        else:
            yield update
        last = update


def _is_same(before: Any, value: Any) -> bool:
    """Whether an output need not be sent again. Values that take time to compare, such as images, are sent."""
    is_short = isinstance(value, str | Preview) or (isinstance(value, dict) and "value" not in value)
    return before is value or (is_short and bool(before == value))


def _lacks_preview(view: JobView, seen: JobView) -> bool:
    """Whether the view has another step than the last one that was seen, and still its preview."""
    return not view.is_over and view.step != seen.step and view.preview is seen.preview
