"""Whether partial images can be decoded is known before a request waits: the server tries it while it warms up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from patchpar import ParallelPipeline
from patchpar.errors import PlanError, WorkerDied
from patchpar.pipeline import decoded_preview
from patchpar.plan.plan import Plan
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.image_call import CallRules
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.settings import RequestLimits, ServedModel, ServerSettings
from patchpar.serving.warm_up import refusal_of
from patchpar.strategies.structure.options import StructureGuidance
from tests.serving.fakes import MODEL
from tests.serving.requests import PATH, client_of
from tests.serving.test_http import error_of

BODY = {"prompt": "a", "size": "64x64", "num_inference_steps": 2, "stream": True, "partial_images": 1}


def service_of(pipe: ParallelPipeline) -> Iterator[ImageService]:
    generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu",)))
    generator.open = lambda: generator.adopt(pipe)  # type: ignore[method-assign]
    generator.close = lambda: None  # type: ignore[method-assign]  # other modules use the pipeline
    service = ImageService(generator, ServerSettings())
    service.load()
    yield service
    service.close()


@pytest.fixture
def without_decoder(pipe: ParallelPipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageService]:
    """Of a pipeline that cannot be ended early."""

    def refuse(*_: Any) -> None:
        raise PlanError("previews by the decoder: it ends in a way of its own: use previews of the latents")

    monkeypatch.setattr(decoded_preview, "_refuse", refuse)
    yield from service_of(pipe)


def test_what_a_pipeline_cannot_decode_is_refused_at_once(without_decoder: ImageService) -> None:
    """With a status: the response has not begun, and nothing was queued."""
    client = client_of(application(without_decoder))
    assert client.get("/v1/models").json()["data"][0]["previews"] == ["linear"]
    error = error_of(client.post(PATH, json={**BODY, "previews": "vae"}), 400)
    assert (error["param"], error["code"]) == ("previews", "unsupported_parameter")
    assert "in a way of its own" in error["message"]
    assert "event: image_generation.completed" in client.post(PATH, json={**BODY, "previews": "linear"}).text
    assert without_decoder.state == "ready"


def test_what_it_can_decode_is_listed(embedded: ImageService) -> None:
    client = client_of(application(embedded))
    assert client.get("/v1/models").json()["data"][0]["previews"] == ["linear", "vae"]
    assert "event: image_generation.completed" in client.post(PATH, json={**BODY, "previews": "vae"}).text


def test_a_strategy_with_latents_of_its_own() -> None:
    rules = CallRules(model=MODEL, served=ServedModel(model="fake", devices=("cpu",)), limits=RequestLimits())
    with pytest.raises(RequestError, match="latents of its own"):
        rules._check_decoder(Plan(strategy=StructureGuidance()))
    rules._check_decoder(Plan())


def test_a_worker_that_fails_at_it_keeps_no_server_from_starting() -> None:
    def lost() -> None:
        raise WorkerDied("rank 1 ended\nTraceback", rank=1)

    assert refusal_of(lost) == "rank 1 ended"
    assert refusal_of(lambda: None) == ""
