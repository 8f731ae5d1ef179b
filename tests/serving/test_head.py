"""HEAD is answered as GET, without a body: load balancers and monitors ask so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from patchpar.serving.service import ImageService
from tests.serving.requests import SECONDS

GETS = ["/health/live", "/health/ready", "/version", "/metrics", "/v1/models", "/v1/models/nothing", "/v1/jobs/none"]


def sent_for(app: Any, path: str, method: str) -> list[Any]:
    """Send a request of a client that stays; return what the server sends, which ends by itself."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "asgi": {"spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
    }

    async def receive() -> Any:
        if sent:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), SECONDS))
    return sent


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_a_body(client: Any, app: Any, path: str) -> None:
    get, head = client.get(path), client.head(path)
    assert head.status_code == get.status_code
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.headers["x-request-id"].startswith("req_")
    start, body = sent_for(app, path, "HEAD")
    assert (start["status"], body["body"], body["more_body"]) == (get.status_code, b"", False)
    if path == "/health/live":
        assert head.headers["content-length"] == str(len(get.content))


def test_head_of_events_ends_at_once(client: Any, app: Any, fake: Any, service: ImageService) -> None:
    """Those of a job that runs: with GET they go on until it ends."""
    fake.gate.clear()
    job = client.post("/v1/images/generations?async=true", json={"prompt": "a"}).json()["id"]
    start, *body = sent_for(app, f"/v1/jobs/{job}/events", "HEAD")
    assert (start["status"], len(body)) == (200, 1)
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert not service.metrics.unsent.names


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("HEAD", "/v1/images/generations", "POST"),
        ("GET", "/v1/images/generations", "POST"),
        ("PUT", "/version", "GET, HEAD"),
        ("OPTIONS", "/v1/jobs/job_1", "DELETE, GET, HEAD"),  # two routes of one path
        ("PUT", "/v1/videos?limit=1", "GET, HEAD, POST"),
    ],
)
def test_a_method_that_a_path_has_not_is_refused_with_all_that_it_has(
    client: Any, method: str, path: str, allowed: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed


def test_head_counts_as_its_route(client: Any) -> None:
    client.head("/version")
    assert 'patchpar_requests_total{code="200",route="/version"} 1.0' in client.get("/metrics").text
