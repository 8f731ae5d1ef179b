"""The page on a server of images: one queue for both, and a log-in where the server has keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect
from typer.testing import CliRunner

from app.feeds import LiveFeed
from app.server import Address
from app.shared_page import SharedPage
from app.workers import AppConfig
from patchpar import PlanError
from patchpar.cli import app as command
from patchpar.launch.devices import resolve_devices
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.http.application import application
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of, until

KEY = "0123456789abcdef-key"
SETUP = AppConfig(model="embedded", devices=resolve_devices(["cpu"]))
OWNER = "a" * 32


@pytest.fixture
def served() -> Iterator[tuple[ImageService, Any, SharedPage]]:
    fake: Any = FakeGenerator()
    service = ImageService(fake, ServerSettings(keys=ApiKeys.of(KEY), page_paths=("/app",)))
    page = SharedPage(SETUP, Address(users=(("me", "secret"),)), service.append_page_job, lambda: fake.pipe)
    yield service, fake, page
    fake.gate.set()
    page.close()
    service.close()


def test_jobs_of_the_page_and_requests_wait_in_one_queue(served: Any) -> None:
    service, fake, page = served
    queue, gate, order = page.state.job_queue, threading.Event(), list[str]()
    with pytest.raises(RequestError, match="being loaded"):
        queue.submit(OWNER, "image", lambda job: order.append("early"))
    service.load()
    client = client_of(application(service), KEY)
    job = queue.submit(OWNER, "image", lambda job: (gate.wait(20), order.append("page"))[1])
    until(lambda: job.view.state == "running", "the page's job")
    waiting = client.post(f"{PATH}?async=true", json={"prompt": "a"}).json()["id"]
    assert (service.waiting, fake.calls) == (1, [])
    with pytest.raises(PlanError, match="already has a job"):
        queue.submit(OWNER, "image", lambda job: None)
    other = queue.submit("b" * 32, "image", lambda job: order.append("never"))
    queue.cancel("b" * 32)
    gate.set()
    job.outcome.result(20)
    until(lambda: client.get(f"/v1/jobs/{waiting}").json()["status"] == "completed", "the request")
    assert order == ["page"]
    assert other.view.state == "cancelled"
    page.close()
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200, "the server goes on"


def test_the_page_is_served_beside_the_routes(served: Any) -> None:
    service, _, page = served
    app = application(service)
    page.add_to(app)
    service.load()
    client = client_of(app)
    assert client.get("/v1/models").status_code == 401
    assert client_of(app, KEY).get("/v1/models").status_code == 200
    assert client.get("/app/").status_code == 200, "the log-in"
    assert client.get("/app/config").status_code == 401
    foreign = client.post("/app/gradio_api/queue/join", json={}, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403
    feed = page.state.feeds.add(LiveFeed())  # browsers send no keys; the name of a stream is its secret
    with client.websocket_connect(f"ws://127.0.0.1/app/{feed.address}/video") as socket:
        socket.send_json({"type": "audio_begin", "rate": 500})
        assert "500 samples per second" in socket.receive_json()["message"]
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("ws://127.0.0.1/v1/streams/a"):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embedded-face", "--app"], "models of images"),
        (["embedded", "--app", "--task", "image-to-image"], "which begins with an image"),
        (["embedded", "--app", "--app-auth", "me"], "--app-auth me: No such file"),
        (["embedded", "--app-auth", "me:mine"], "--app-auth is the log-in of the page of --app: add --app"),
        (["embedded", "--app", "--trusted-network"], "--app with --secret-file or --trusted-network"),
    ],
)
def test_flags(arguments: list[str], message: str) -> None:
    response = CliRunner().invoke(command, ["serve", *arguments])
    assert response.exit_code == 2
    assert message in response.output


def test_a_model_of_videos_has_no_page() -> None:
    """Its first call would be a whole video, and each run of the page would fail."""
    pipe: Any = SimpleNamespace(description=SimpleNamespace(pipeline="WanPipeline"))
    jobs = list[Any]()
    page = SharedPage(SETUP, Address(), lambda work: jobs.append(work), lambda: pipe)  # type: ignore[arg-type, func-returns-value]
    with pytest.raises(PlanError, match="this model is a WanPipeline, which makes video"):
        page.begin()
    assert jobs == []
    page.close()
