"""Images over HTTP are those of the pipeline itself, bit for bit."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from patchpar import ParallelPipeline, Plan, PlanError, WorkerDied
from patchpar.cli.serve import ServeFlags, _service
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.image_request import parse_request
from patchpar.serving.job import Cancelled
from patchpar.serving.prompt_tokens import PromptTokens
from patchpar.serving.server import ModelServer
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from tests.serving.requests import PATH, client_of, example_of_the_page, until

PROMPT = "a red house on the left, green hills at noon"
SMALL = {"prompt": PROMPT, "size": "96x64", "num_inference_steps": 2}


@pytest.fixture(scope="module")
def client(embedded: ImageService) -> Any:
    return client_of(application(embedded))


def image_of(data: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


class Words:
    """A tokenizer that takes so many words."""

    def __init__(self, limit: int) -> None:
        self.model_max_length = limit

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


@cache
def generated(pipe: ParallelPipeline, seed: int, **arguments: Any) -> Any:
    """The image [H, W, 3] that a pipeline makes by itself: once for all tests that compare with it."""
    generator = torch.Generator().manual_seed(seed)
    options = {"height": 64, "width": 96, "num_inference_steps": 2, **arguments}
    return np.asarray(pipe(PROMPT, generator=generator, **options).images[0])


def test_images_of_a_seed_are_those_of_the_pipeline(client: Any, pipe: ParallelPipeline) -> None:
    """Two images in one request equal the two made alone, with the seed and the next one."""
    response = client.post(PATH, json={**SMALL, "seed": 7, "n": 2})
    found = response.json()
    assert response.status_code == 200, found
    first, second = (image_of(each["b64_json"]) for each in found["data"])
    assert np.array_equal(first, generated(pipe, 7))
    assert np.array_equal(second, generated(pipe, 8))
    assert not np.array_equal(first, second)
    assert found["size"] == "96x64"
    assert found["usage"]["output_tokens"] == 2 * 12 * 8
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + 2 * 12 * 8
    assert found["usage"]["input_tokens"] == len(pipe.tokenizer(PROMPT)["input_ids"])
    figures = found["patchpar"]
    assert (figures["seed"], figures["steps"], figures["ranks"], figures["plan"]) == (7, 4, 1, "single")


def test_a_prompt_that_is_too_long_is_answered_with_a_warning(client: Any, pipe: ParallelPipeline) -> None:
    """A text encoder takes so many tokens, and the rest of the prompt is not used."""
    limit = pipe.tokenizer.model_max_length
    fits, long = " ".join(["red"] * (limit - 2)), " ".join(["red"] * (limit - 1))
    asked = {**SMALL, "num_inference_steps": 1}
    assert "warning" not in client.post(PATH, json={**asked, "prompt": fits}).headers
    warning = client.post(PATH, json={**asked, "prompt": long, "negative_prompt": long}).headers["warning"]
    wanted = f"prompt has {limit + 1} tokens, of which this model takes {limit}"
    assert warning == f'299 patchpar "{wanted}", 299 patchpar "negative_{wanted}"'


def test_the_longest_prompt_is_that_of_the_tokenizer_that_takes_most() -> None:
    """It is unknown where the pipeline has a limit of its own, or a tokenizer has none."""

    def tokens(parameters: dict[str, Any], *limits: float) -> PromptTokens:
        names = ("tokenizer", "tokenizer_2", "tokenizer_3")
        made = {name: Words(int(limit)) for name, limit in zip(names, limits, strict=False)}
        return PromptTokens(SimpleNamespace(description=SimpleNamespace(parameters=parameters), **made))

    five = "a b c d e"
    assert tokens({}, 4).unused(five) == "has 5 tokens, of which this model takes 4"
    assert tokens({}, 4, 5).unused(five) == tokens({"max_sequence_length": 3}, 4).unused(five) == ""
    assert tokens({}, 4, 1e30).unused(five) == tokens({}).unused(five) == ""


def test_arguments_reach_the_pipeline(client: Any, pipe: ParallelPipeline) -> None:
    asked = {"negative_prompt": "a lake", "guidance_scale": 7.5}
    response = client.post(PATH, json={**SMALL, "size": "auto", "height": 64, "width": 96, "seed": 3, **asked})
    found = image_of(response.json()["data"][0]["b64_json"])
    assert np.array_equal(found, generated(pipe, 3, **asked))
    assert not np.array_equal(found, generated(pipe, 3))


def test_a_request_without_a_seed_says_which_it_got(client: Any) -> None:
    first, second = (client.post(PATH, json={**SMALL, "num_inference_steps": 1}).json() for _ in range(2))
    assert first["patchpar"]["seed"] != second["patchpar"]["seed"]


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_formats(client: Any, kind: str) -> None:
    asked = {**SMALL, "num_inference_steps": 1, "seed": 1, "output_format": kind}
    large, small = (client.post(PATH, json={**asked, "output_compression": each}).json() for each in (100, 5))
    images = [base64.b64decode(each["data"][0]["b64_json"]) for each in (large, small)]
    assert Image.open(io.BytesIO(images[0])).format == kind.upper()
    assert len(images[1]) < len(images[0])
    assert large["output_format"] == kind


def test_a_plan_for_more_devices_is_refused(client: Any) -> None:
    response = client.post(PATH, json={**SMALL, "plan": "patch=2"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "plan"


def test_a_running_image_is_cancelled_at_its_next_step(client: Any, embedded: ImageService) -> None:
    queued = embedded.submit(parse_request(json.dumps({**SMALL, "num_inference_steps": 150}).encode()))
    until(lambda: queued.view.step >= 1, "a step")
    queued.cancel()
    with pytest.raises(Cancelled):
        queued.outcome.result(20)
    assert queued.view.step < 150
    assert client.post(PATH, json={**SMALL, "num_inference_steps": 1}).status_code == 200


@pytest.mark.breadth
def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Its request goes on with a new worker, and so do those after it; each image is what it was before."""
    generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu", "cpu"), plan=Plan(patch=2)))
    service = ImageService(generator, ServerSettings())
    try:
        service.load()
        client = client_of(application(service))
        before = client.post(PATH, json={**SMALL, "seed": 1}).json()
        long = {**SMALL, "seed": 2, "num_inference_steps": 30}
        queued = service.submit(parse_request(json.dumps(long).encode()))
        until(lambda: queued.view.step >= 1, "a step")
        os.kill(generator.pipe._state.executor.pids[1], signal.SIGKILL)
        found = np.asarray(queued.outcome.result(120).images[0]).astype(int)
        whole = image_of(client.post(PATH, json=long).json()["data"][0]["b64_json"])
        assert np.abs(found - whole).max() <= 1
        after = client.post(PATH, json={**SMALL, "seed": 1}).json()
        assert after["data"] == before["data"]
        assert (after["patchpar"]["ranks"], after["patchpar"]["plan"]) == (2, str(Plan(patch=2)))
        assert client.get("/health/ready").status_code == 200
        metrics = client.get("/metrics").text
        assert 'patchpar_bytes_sent_total{kind="halo",rank="1"}' in metrics
    finally:
        service.close()


@pytest.mark.parametrize(("flag", "retries"), [("on", 2), ("off", 0)])
def test_whether_a_request_goes_on_after_a_lost_worker(flag: str, retries: int) -> None:
    """The flag reaches each call; what a call does with it is in tests/pipeline/test_recovery.py."""
    service: Any = _service(ServeFlags(model="embedded", devices="cpu", recover=flag))
    given: list[int] = []

    def submit(*, max_retries: int, **_: Any) -> None:
        given.append(max_retries)
        raise WorkerDied("rank 0 ended", rank=0)

    generator = service.generator
    generator._pipe = SimpleNamespace(submit=submit)
    with pytest.raises(WorkerDied):
        generator._submit({}, "auto", (0,))
    assert given == [retries]
    with pytest.raises(PlanError, match="--recover maybe: use on or off"):
        _service(ServeFlags(model="embedded", devices="cpu", recover="maybe"))


@pytest.mark.breadth
def test_a_worker_that_is_killed_with_recover_off() -> None:
    """Its request fails, with the request's ID; the next one has new workers."""
    served = ServedModel(model="embedded", devices=("cpu", "cpu"), plan=Plan(patch=2), recovers=False)
    generator = ImageGenerator(served)
    service = ImageService(generator, ServerSettings())
    try:
        service.load()
        client = client_of(application(service))
        begun = generator._submit

        def killed(*arguments: Any, **options: Any) -> Any:
            generator._submit = begun  # type: ignore[method-assign]
            call = begun(*arguments, **options)
            until(lambda: call.progress.step >= 1, "a step")
            os.kill(generator.pipe._state.executor.pids[1], signal.SIGKILL)
            return call

        generator._submit = killed  # type: ignore[method-assign]
        response = client.post(PATH, json={**SMALL, "num_inference_steps": 30})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "worker_lost"
        assert response.headers["x-request-id"] in response.json()["error"]["message"]
        assert client.post(PATH, json=SMALL).status_code == 200
    finally:
        service.close()


@pytest.fixture(scope="module")
def address(embedded: ImageService) -> Iterator[str]:
    server = ModelServer(embedded)
    server.start()
    yield server.url
    server.close()


def test_the_client_of_openai(address: str, pipe: ParallelPipeline) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert [each.id for each in client.models.list()] == ["embedded"]
        assert client.models.retrieve("embedded").owned_by == "patchpar"
        found: Any = client.images.generate(
            model="embedded",
            prompt=PROMPT,
            n=1,
            size="96x64",  # type: ignore[arg-type]
            extra_body={"seed": 7, "num_inference_steps": 2},
        )
        assert np.array_equal(image_of(found.data[0].b64_json), generated(pipe, 7))
        assert found.usage.output_tokens == 12 * 8
        assert found.patchpar["seed"] == 7
        with pytest.raises(openai.BadRequestError, match="nearest is 96x64") as refused:
            client.images.generate(prompt=PROMPT, size="99x64")  # type: ignore[call-overload]
        assert (refused.value.param, refused.value.code) == ("size", "invalid_size")
        assert str(refused.value.request_id).startswith("req_")
        with pytest.raises(openai.NotFoundError, match="'embedded'"):
            client.images.generate(model="dall-e-3", prompt=PROMPT)


def test_the_examples_of_the_page(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = example_of_the_page("extra_body")
    small = example.replace("256x256", "64x64").replace('steps": 20', 'steps": 1')
    events = example_of_the_page("partial_images=3")
    small_events = events.replace("stream=True", 'stream=True, size="64x64", extra_body={"num_inference_steps": 4}')
    monkeypatch.chdir(tmp_path)
    exec(small.replace("http://127.0.0.1:8000", address), names := {})
    capsys.readouterr()
    exec(small_events, names)
    kinds = [line.split()[0].rpartition(".")[2] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["partial_image"] * 3 + ["completed"]
    assert [Image.open(tmp_path / f"house-{number}.png").size for number in (0, 1)] == [(64, 64)] * 2
