"""Waits for a job beside its client: when the client disconnects, the job is cancelled."""

import asyncio
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from patchpar.serving.job import Job
from patchpar.serving.kept_jobs import KeptJob

LOOK_SECONDS = 0.05
"""Between looks at a job whose result is being encoded."""


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
