"""Events of requests for images: partial images, finished ones, errors, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from patchpar.errors import WorkerDied
from patchpar.serving.http import job_events
from patchpar.serving.job import Job
from patchpar.serving.service import ImageService
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, disconnected, is_busy, until


def events_in(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_partial_images_come_before_each_finished_one(client: Any, fake: FakeGenerator) -> None:
    body = {"prompt": "a fox", "n": 2, "seed": 5, "stream": True, "partial_images": 2, "output_format": "webp"}
    response = client.post(PATH, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_in(response.text)
    assert [name for name, _ in events] == (["image_generation.partial_image"] * 2 + ["image_generation.completed"]) * 2
    assert all(data["type"] == name for name, data in events)
    assert [data.get("partial_image_index") for _, data in events[:3]] == [0, 1, None]
    assert {"b64_json", "created_at", "size", "quality", "background", "output_format"} <= set(events[0][1])
    assert events[5][1]["usage"]["total_tokens"] == 3 + 32 * 32
    assert [data["patchpar"]["seed"] for name, data in events if name.endswith("completed")] == [5, 6]
    assert fake.calls[0].partial_images == 2


def test_without_partial_images_there_are_finished_ones_only(client: Any) -> None:
    response = client.post(PATH, json={"prompt": "a fox", "stream": True})
    assert [name for name, _ in events_in(response.text)] == ["image_generation.completed"]
    assert response.headers["x-accel-buffering"] == "no"  # else nginx sends what is small once the response has ended


def test_an_error_is_an_event(client: Any, fake: FakeGenerator) -> None:
    fake.error = WorkerDied("rank 1 ended\nTraceback: /secret/path", rank=1)
    ((name, data),) = events_in(client.post(PATH, json={"prompt": "a fox", "stream": True}).text)
    assert (name, data["error"]["code"]) == ("error", "worker_lost")
    assert "secret" not in data["error"]["message"]


def test_a_refusal_is_a_status(client: Any) -> None:
    response = client.post(PATH, json={"prompt": "a fox", "stream": True, "size": "100x100"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_size")


def test_a_client_that_leaves_a_stream_cancels_it(app: Any, fake: FakeGenerator, service: ImageService) -> None:
    fake.gate.clear()
    sent = disconnected(app, {"prompt": "a fox", "stream": True}, fake.started.is_set)
    assert [message["type"] for message in sent] == ["http.response.start"]
    until(lambda: not is_busy(service), "the call to be cancelled")


def test_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is silent for long would be closed by proxies on the way."""
    monkeypatch.setattr(job_events, "HEARTBEAT_SECONDS", 0.01)
    job = Job(lambda job: None)

    async def first() -> bytes:
        async for event in job_events.events_of(job, lambda event: b""):
            return event
        return b"ended"

    assert asyncio.run(first()).startswith(b":")


def test_nothing_stays_behind(client: Any) -> None:
    """Who has listened to a job is forgotten, with a job that has long ended too."""
    job = Job(lambda job: job.send("event"))
    job.run()
    with job.listening(lambda: None):
        pass
    assert job._listeners == []
    assert job.events() == ("event",)


def test_a_listener_is_called_once_the_outcome_is_there() -> None:
    for ends in (Job.run, Job.cancel):
        job, seen = Job(lambda job: None), list[bool]()
        with job.listening(lambda job=job, seen=seen: seen.append(job.outcome.done())):  # type: ignore[misc]
            ends(job)
        assert seen[-1]
        assert not job.outcome._done_callbacks, "one for each who has listened would stay with the job"


def test_a_job_keeps_no_call_that_has_ended() -> None:
    """One of many images, or one that was suspended again and again, would keep the output of each call."""
    job, called = Job(lambda job: None), list[str]()
    for _ in range(3):
        with job.during(cancel=lambda: called.append("cancel"), suspend=lambda: called.append("suspend")):
            assert (len(job._on_cancel), len(job._on_suspend)) == (1, 1)
    assert (job._on_cancel, job._on_suspend, called) == ([], [], [])
    job.suspend()
    with job.during(cancel=lambda: called.append("cancel"), suspend=lambda: called.append("suspend")):
        assert called == ["suspend"], "it was to be suspended before"
        job.cancel()
    assert called == ["suspend", "cancel"]
