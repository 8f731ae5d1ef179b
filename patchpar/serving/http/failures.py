"""Exceptions of a job as responses. Details of a failure are in the server's log, under the request's ID."""

import logging

from patchpar.errors import (
    LaunchError,
    PatchparError,
    PlanError,
    RetriesExhausted,
    WorkerDied,
    WorkerHung,
)
from patchpar.serving.job import Cancelled, Journaled, ServerEnding
from patchpar.serving.out_of_memory import is_out_of_memory
from patchpar.serving.pipeline_fields import field_of
from patchpar.serving.request_error import RequestError

RESTART_SECONDS = 10
log = logging.getLogger(__name__)


def logged_error_of(error: Exception, name: str) -> RequestError:
    """Return the error of the response. `name`: what the client is told to look for in the log, which has the rest."""
    found = request_error_of(error, name)
    if found.status >= 500 and not isinstance(error, (RequestError, Cancelled)):
        log.error("%s failed", name, exc_info=error)
    return found


def request_error_of(error: Exception, request_id: str) -> RequestError:
    """Return the error of the response."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PlanError):
        return RequestError(str(error), param=field_of(str(error)))
    if isinstance(error, Cancelled):
        return _cancellation_of(error)
    if is_out_of_memory(error):
        free = getattr(error, "free", "")
        figures = f", of which are free now: {free}" if free else ""
        reason = f"this result does not fit into the memory of the devices{figures}. Make it smaller"
        return RequestError(reason, status=422, code="out_of_memory")
    return _failure_of(error, request_id)


def _cancellation_of(error: Cancelled) -> RequestError:
    if isinstance(error, Journaled):
        kind = "videos" if error.name.startswith("video") else "jobs"
        reason = (
            f"the server is ending; when it is started again, it goes on with this request as {error.name}: "
            f"GET /v1/{kind}/{error.name}"
        )
        return RequestError(reason, status=503, code="draining", retry_after=RESTART_SECONDS, is_final=True)
    if isinstance(error, ServerEnding):
        reason = "the server is ending, and this request did not finish"
        return RequestError(reason, status=503, code="draining", retry_after=1)
    return RequestError("another request has cancelled this one", status=410, code="cancelled")


def _failure_of(error: Exception, request_id: str) -> RequestError:
    if isinstance(error, (WorkerDied, WorkerHung, RetriesExhausted)):
        reason = f"a worker failed meanwhile; workers are being started again: repeat the request ({request_id})"
        return RequestError(reason, status=500, code="worker_lost")
    if isinstance(error, LaunchError):
        reason = f"the workers could not be started ({request_id})"
        return RequestError(reason, status=503, code="workers_unavailable", retry_after=RESTART_SECONDS)
    kind = "" if isinstance(error, PatchparError) else f" with {type(error).__name__}"
    reason = f"generation failed{kind}; the server's log says where ({request_id})"
    return RequestError(reason, status=500, code="failed", is_final=True)
