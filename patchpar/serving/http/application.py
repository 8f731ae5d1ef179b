"""The routes: those of other modules, and models, health, version, metrics."""

import time
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from patchpar.serving.http.access import RequestGuard, error_response
from patchpar.serving.http.admin import add_admin
from patchpar.serving.http.files import add_files
from patchpar.serving.http.image_socket import add_image_socket
from patchpar.serving.http.images import add_images
from patchpar.serving.http.jobs import add_jobs
from patchpar.serving.http.streams import add_no_streams, add_streams
from patchpar.serving.http.videos import add_videos
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.streams.stream_service import StreamService

Served = ImageService | StreamService


def application(service: ImageService) -> FastAPI:
    """Return the ASGI application of a service of images or videos."""
    app = _guarded(service)
    add_images(app, service)
    add_image_socket(app, service)
    add_files(app, service.files)
    add_jobs(app, service)
    add_videos(app, service)
    add_admin(app, service)
    add_no_streams(app)
    return app


def stream_application(service: StreamService) -> FastAPI:
    """Return the ASGI application of a service of streams."""
    app = _guarded(service)
    add_streams(app, service)
    return app


def _guarded(service: Served) -> FastAPI:
    """Return an application with access, models, health, version and metrics."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestGuard, settings=service.settings, metrics=service.metrics, tickets=service.tickets)
    app.add_exception_handler(HTTPException, _no_route)
    _add_models(app, service)
    _add_state(app, service)
    return app


def _add_models(app: FastAPI, service: Served) -> None:
    started = int(time.time())

    def described() -> dict[str, Any]:
        names = {"id": service.name, "object": "model", "created": started, "owned_by": "patchpar"}
        return {**names, "adapters": list(service.loras.names), **service.model_facts}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the served model."""
        service.check_name(name)
        return described()


def _add_state(app: FastAPI, service: Served) -> None:
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        """Answer as long as the process does."""
        return {"status": "live"}

    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        """Answer 200 if a request would be accepted and its workers are there, else 503."""
        state = service.state
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    @app.get("/version")
    async def versions() -> dict[str, str]:
        """Return the version of patchpar."""
        return {"version": version("patchpar")}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return counts for Prometheus."""
        return Response(service.metrics.text(), media_type=service.metrics.content_type)


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer a path or a method that is none in the form of all errors."""
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path[:200]}: {error.detail}"
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    answer = error_response(RequestError(reason, status=error.status_code, code=code))
    answer.headers.update(error.headers or {})
    if error.status_code == 405:
        answer.headers["Allow"] = ", ".join(_methods_of(request))
    return answer


def _methods_of(request: Request) -> list[str]:
    """Return the methods of all routes of a path (RFC 9110, section 15.5.6); Starlette knows those of the first."""
    routes = (each for each in request.app.routes if isinstance(each, Route))
    found = {name for each in routes if each.matches(request.scope)[0] is not Match.NONE for name in each.methods or ()}
    return sorted(found | ({"HEAD"} if "GET" in found else set()))
