"""Waits for a job beside its client: when the client disconnects, the job is cancelled."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from patchpar.serving.job import Job
from patchpar.serving.kept_jobs import KeptJob

T = TypeVar("T")
LOOK_SECONDS = 0.05
"""Between looks at a job whose result is being encoded."""


async def submitted(submit: Callable[[], T], job_of: Callable[[T], Job]) -> T:
    """Return what `submit` returns, in a thread, since it may scale large images meanwhile.

    If this is cancelled, so is the job, also one that is only queued then.
    """
    begun = asyncio.ensure_future(asyncio.to_thread(submit))

    def leave(found: "asyncio.Future[T]") -> None:
        if not found.cancelled() and found.exception() is None:
            job_of(found.result()).cancel()

    try:
        return await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(leave)
        raise


async def outcome_of(job: Job, request: Request) -> Any:
    """Return the result of a job, or raise its exception. Raises ClientDisconnect once the client has gone.

    The job is then cancelled: at once while it waits, at its next step while it runs. The body must have been read.
    """
    outcome = asyncio.wrap_future(job.outcome)
    gone = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait({outcome, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            raise ClientDisconnect
        return outcome.result()
    finally:
        gone.cancel()
        outcome.cancel()  # or asyncio logs each exception that nobody is left for
        job.cancel()  # does nothing to a job that has ended


async def until_ended(kept: KeptJob, request: Request) -> None:
    """Wait until a kept job has its result or its error. Raises ClientDisconnect once the client has gone."""
    gone = asyncio.create_task(_until_gone(request))
    try:
        while not kept.ended.is_set():
            done, _ = await asyncio.wait({gone}, timeout=LOOK_SECONDS)
            if done:
                raise ClientDisconnect
    finally:
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
