"""Waits for a job beside its client: when the client disconnects, the job is cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from patchpar.serving.http.event_stream import until_gone
from patchpar.serving.job import Job


async def submitted(submit: Callable[[], Job]) -> Job:
    """Return the job that `submit` queues, in a thread, since it may scale large images meanwhile.

    If this is cancelled, so is the job, also one that is only queued then.
    """
    begun = asyncio.ensure_future(asyncio.to_thread(submit))

    def leave(found: "asyncio.Future[Job]") -> None:
        if not found.cancelled() and found.exception() is None:
            found.result().cancel()

    try:
        return await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(leave)
        raise


async def outcome_of(job: Job, request: Request) -> Any:
    """Return the result of a job, or raise its exception. Raises ClientDisconnect once the client has gone.

    The job is then cancelled: at once while it waits, at its next step while it runs. The body must have been read.
    """
    try:
        return await unless_gone(job.outcome, request)
    finally:
        job.cancel()  # does nothing to a job that has ended


async def unless_gone(future: "Future[Any]", request: Request) -> Any:
    """Return the result of a running future, or raise its exception. Raises ClientDisconnect once the client has gone.

    The body must have been read.
    """
    outcome = asyncio.wrap_future(future)
    gone = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait([outcome, gone], return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            raise ClientDisconnect
        return outcome.result()
    finally:
        gone.cancel()
        outcome.cancel()  # or asyncio logs each exception that nobody is left for
