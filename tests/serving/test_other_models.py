"""Models other than the embedded one: what their classes and schedulers cannot do is refused, and never a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from patchpar import ParallelPipeline
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.service import ImageService
from patchpar.serving.settings import RequestLimits, ServedModel, ServerSettings
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_http import error_of
from tests.tiny import build

MANY = 99_999
"""More steps than schedulers with a table of 1000 take."""
SMALL = {"prompt": "a fox", "size": "64x64", "num_inference_steps": 2}
LIMITS = RequestLimits(steps=MANY)


@contextmanager
def served(name: str) -> Iterator[Any]:
    """A client of a server of a tiny pipeline, on one device in this process."""
    with ParallelPipeline(build(name).pipe, devices="cpu") as pipe:
        generator = ImageGenerator(ServedModel(model=name, devices=("cpu",)))
        generator.open = lambda: generator.adopt(pipe)  # type: ignore[method-assign]
        generator.warm_up = lambda job: setattr(generator, "_is_warm", True)  # type: ignore[method-assign]
        service = ImageService(generator, ServerSettings(port=0, limits=LIMITS))
        service.load()
        try:
            yield client_of(application(service))
        finally:
            service.close()


@pytest.fixture(scope="module")
def sd() -> Iterator[Any]:
    with served("sd") as client:
        yield client


def test_steps_that_the_scheduler_refuses(sd: Any) -> None:
    """In one sentence with the way out, wherever the request comes from; the server goes on."""
    many = {**SMALL, "num_inference_steps": MANY}
    error = error_of(sd.post(PATH, json=many), 400)
    assert (error["param"], error["code"]) == ("num_inference_steps", "invalid_value")
    assert error["message"].startswith(f"num_inference_steps={MANY}: DDIMScheduler, the scheduler of this model")
    assert error["message"].endswith("1000 timesteps): use another number")
    events = sd.post(PATH, json={**many, "stream": True}).text
    assert json.loads(events.partition("data: ")[2].partition("\n")[0])["error"] == error
    job = f"/v1/jobs/{sd.post(f'{PATH}?async=true', json=many).json()['id']}"
    until(lambda: sd.get(job).json()["status"] == "failed", "the job")
    assert sd.get(job).json()["error"]["message"] == error["message"]
    assert sd.post(PATH, json=SMALL).status_code == 200


def test_a_video_of_steps_that_the_scheduler_refuses() -> None:
    with served("text_to_video") as client:
        made = client.post("/v1/videos", json={**SMALL, "num_frames": 4, "num_inference_steps": MANY}).json()
        video = f"/v1/videos/{made['id']}"
        until(lambda: client.get(video).json()["status"] == "failed", "the video")
        error = client.get(video).json()["error"]
        assert error["code"] == "invalid_value"
        assert f"num_inference_steps={MANY}: DDIMScheduler" in error["message"]


def test_another_error_of_a_call_stays_a_failure(sd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the scheduler would refuse the steps, and another part of the call has failed."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("boom")

    monkeypatch.setattr(ImageGenerator, "generate", fails)
    assert error_of(sd.post(PATH, json={**SMALL, "num_inference_steps": MANY}), 500)["code"] == "failed"
