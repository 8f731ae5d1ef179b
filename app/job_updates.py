"""Follows a job for a page: no handler blocks on workers, so any number of pages can watch."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import gradio as gr

from .blocks import Preview
from .job_queue import Job, JobView

BEGIN_SECONDS = 0.7
"""How long a page waits for its first update, for a job that need not wait: a short step has ended by then, whose ranks
share their cores with this process and, on one machine, with the browser. An update before it takes about 60 ms of
their time."""
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
        seen = job.view
        await _first_step(job, changed)
        while True:
            if _lacks_preview(job.view, seen):
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), PREVIEW_SECONDS)
            seen = job.view
            yield show(seen)
            if seen.is_over:
                return
            await _until(partial(_has_changed, seen.version), job, changed)


async def _first_step(job: Job, changed: asyncio.Event) -> None:
    """Wait for the job's first step or its end, for BEGIN_SECONDS at most; not where other jobs are ahead of it."""
    begun = _until(lambda view: bool(view.step or view.ahead or view.is_over), job, changed)
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(begun, BEGIN_SECONDS)


async def _until(condition: Callable[[JobView], bool], job: Job, changed: asyncio.Event) -> None:
    """Wait until it holds for the job's view. `changed` is set after the view has changed."""
    changed.clear()
    while not condition(job.view):
        await changed.wait()
        changed.clear()


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


def _has_changed(version: int, view: JobView) -> bool:
    return view.version != version


def _lacks_preview(view: JobView, seen: JobView) -> bool:
    """Whether the view has another step than the last one that was seen, and still its preview."""
    return not view.is_over and view.step != seen.step and view.preview is seen.preview
