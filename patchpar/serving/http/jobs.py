"""Routes of jobs whose results are fetched later: state, events, cancel, delete, list."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from patchpar.serving.http.access import owner_of
from patchpar.serving.http.event_stream import HEARTBEAT, EventStream, event_of
from patchpar.serving.http.failures import request_error_of
from patchpar.serving.http.files import with_whole_links
from patchpar.serving.http.job_events import changes_of
from patchpar.serving.job import Journaled
from patchpar.serving.kept_jobs import KeptJob
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService

MAX_PAGE, PAGE = 100, 20


def add_jobs(app: FastAPI, service: ImageService) -> None:
    """Add the routes."""

    def found(request: Request, name: str) -> KeptJob:
        return service.kept.get(name, "job", owner_of(request))

    @app.get("/v1/jobs")
    async def jobs(request: Request) -> dict[str, Any]:
        """List jobs, without their results."""
        return page_of(
            request, service.kept.all_of("job", owner_of(request)), lambda kept: job_view(service, kept, request, False)
        )

    @app.get("/v1/jobs/{name}")
    async def job(request: Request, name: str) -> dict[str, Any]:
        """Return a job, with its result once it has one."""
        return job_view(service, found(request, name), request)

    @app.get("/v1/jobs/{name}/events")
    async def events(request: Request, name: str) -> Response:
        """Send the steps of a job as they are done, and its end. Whoever reads them may leave: the job goes on."""
        kept = found(request, name)
        return EventStream(_progress_of(kept, lambda: job_view(service, kept, request, False)))

    @app.post("/v1/jobs/{name}/cancel")
    async def cancel(request: Request, name: str) -> JSONResponse:
        """Cancel a job: at once while it waits, else before its next call of a denoiser."""
        kept = found(request, name)
        kept.job.cancel()
        return JSONResponse(job_view(service, kept, request, False), status_code=202)

    @app.delete("/v1/jobs/{name}")
    async def delete(request: Request, name: str) -> dict[str, Any]:
        """Cancel a job and delete its result."""
        service.kept.delete(found(request, name))
        return {"id": name, "object": "job.deleted", "deleted": True}


def job_view(service: ImageService, kept: KeptJob, request: Request, with_result: bool = True) -> dict[str, Any]:
    """Return the JSON of a job."""
    view = kept.job.view
    return {
        "id": kept.id,
        "object": "job",
        "status": kept.status,
        "progress": kept.progress,
        "ahead": view.ahead,
        "step": view.step,
        "steps": view.steps,
        "model": service.name,
        "created_at": kept.created_at,
        "completed_at": kept.completed_at,
        "expires_at": service.kept.expires_at(kept),
        "error": error_of(kept),
        "result": with_whole_links(kept.result, request) if with_result and kept.result is not None else None,
    }


def error_of(kept: KeptJob) -> Any:
    """Return the body of a job's error; None without one. A cancelled job has the code "cancelled".

    One that the next server goes on with has none.
    """
    if kept.error is None or isinstance(kept.error, Journaled):
        return None
    if kept.status == "cancelled":
        return RequestError("this job was cancelled", code="cancelled").body["error"]
    return request_error_of(kept.error, kept.id).body["error"]


def page_of(request: Request, kept: Sequence[KeptJob], view: Callable[[KeptJob], dict[str, Any]]) -> dict[str, Any]:
    """Return a page of jobs as OpenAI's lists have it, by `after`, `limit` and `order` of the query.

    Raises RequestError for values that these cannot have.
    """
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", str(PAGE))
    if order not in ("asc", "desc"):
        raise RequestError(f"order={order[:40]!r}: use asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_PAGE)) and 1 <= int(limit) <= MAX_PAGE):
        raise RequestError(f"limit={limit[:40]!r}: use 1 to {MAX_PAGE}", param="limit")
    ordered = list(kept) if order == "asc" else list(kept)[::-1]
    after = query.get("after")
    if after is not None:
        names = [each.id for each in ordered]
        if after not in names:
            raise RequestError(f"after={after[:80]!r}: there is none of this ID", param="after")
        ordered = ordered[names.index(after) + 1 :]
    listed = [view(each) for each in ordered[: int(limit)]]
    return {
        "object": "list",
        "data": listed,
        "first_id": listed[0]["id"] if listed else None,
        "last_id": listed[-1]["id"] if listed else None,
        "has_more": len(ordered) > len(listed),
    }


async def _progress_of(kept: KeptJob, view: Callable[[], dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yield the state of a job after each change, the last one under the name of its end."""
    last: dict[str, Any] = {}
    async for is_changed in changes_of(kept.job):
        now = view()
        if not is_changed:
            yield HEARTBEAT
        elif now != last and not kept.ended.done():
            yield event_of("job.progress", now)
            last = now
    await asyncio.wrap_future(kept.ended)  # its result may still be encoded
    yield event_of(f"job.{kept.status}", view())
