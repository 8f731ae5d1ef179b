"""What clients are told: every bad request has its status, code and field, and nobody else's request is lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from patchpar.errors import LaunchError, PlanError, RetriesExhausted, WorkerDied, WorkerOutOfMemory
from patchpar.pipeline.rank_stats import RankStats, StepStats
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.http.access import error_response
from patchpar.serving.http.application import application
from patchpar.serving.http.failures import request_error_of
from patchpar.serving.image_call import CallRules
from patchpar.serving.image_request import FIELDS, parse_request
from patchpar.serving.job import Journaled, ServerEnding
from patchpar.serving.metrics import ServerMetrics
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.settings import RequestLimits, ServedModel, ServerSettings
from tests.serving.fakes import MODEL, FakeGenerator
from tests.serving.requests import HOME, PATH, client_of, disconnected, is_busy, until

KEY = "0123456789abcdef-key"
JSON = {"Content-Type": "application/json"}
BAD: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({}, "prompt", "missing_parameter", "describe"),
    ({"prompt": "  "}, "prompt", "invalid_value", "empty"),
    ({"prompt": 3}, "prompt", "invalid_value", "string"),
    ({"prompt": ["a", "b"]}, "prompt", "invalid_value", "string"),
    ({"prompt": "a" * 32_001}, "prompt", "invalid_value", "32000"),
    ({"promt": "a"}, "promt", "unknown_parameter", "did you mean 'prompt'"),
    ({"num_inference_step": 3}, "num_inference_step", "unknown_parameter", "'num_inference_steps'"),
    ({"xyzzy" * 100: 3}, ("xyzzy" * 100)[:64], "unknown_parameter", "output_format"),
    ({"degree": 2}, "degree", "invalid_value", "there are 1 devices"),
    ({"degree": 0}, "degree", "invalid_value", "1"),
    ({"degree": 1, "plan": "single"}, "degree", "invalid_value", "give one of them"),
    ({"previews": "none"}, "previews", "invalid_value", "'linear'"),
    ({"response_format": "url", "stream": True}, "response_format", "unsupported_parameter", "stream=true"),
    ({"lora": [{"name": "ink"}]}, "lora.0.name", "lora_not_found", "--lora"),
    ({"image": "/etc/passwd"}, "image", "unsupported_parameter", "as a file of a form"),
    ({"frame_count": 3}, "frame_count", "unsupported_parameter", "does not apply"),
    ({"response_format": "url"}, "response_format", "unsupported_parameter", "b64_json"),
    ({"partial_images": 2}, "partial_images", "unsupported_parameter", "stream=true"),
    ({"stream": True, "partial_images": 4}, "partial_images", "invalid_value", "3"),
    ({"strength": 0.5}, "strength", "unsupported_parameter", "FakePipeline"),
    ({"deadline_ms": 0}, "deadline_ms", "invalid_value", "1"),
    ({"priority": 11}, "priority", "invalid_value", "10"),
    ({"background": "transparent"}, "background", "unsupported_parameter", "opaque"),
    ({"moderation": "low"}, "moderation", "unsupported_parameter", "moderate"),
    ({"output_format": "gif"}, "output_format", "unsupported_parameter", "'png', 'jpeg' or 'webp'"),
    ({"output_format": "bmp"}, "output_format", "invalid_value", "'png', 'jpeg' or 'webp'"),
    ({"output_format": ["gif"]}, "output_format", "invalid_value", "'png', 'jpeg' or 'webp'"),
    ({"output_compression": 101}, "output_compression", "invalid_value", "100"),
    ({"output_compression": 50}, "output_compression", "unsupported_parameter", "jpeg or webp"),
    ({"n": 0}, "n", "invalid_value", "n=0: "),
    ({"prompt": None}, "prompt", "invalid_value", "prompt=null: "),
    ({"n": 11}, "n", "invalid_value", "10"),
    ({"n": "2"}, "n", "invalid_value", 'n="2": Input should be a valid integer'),
    ({"n": True}, "n", "invalid_value", "n=true: "),
    ({"n": 3}, "n", "above_limit", "at most 2"),
    ({"seed": -1}, "seed", "invalid_value", "0"),
    ({"seed": 2**63}, "seed", "invalid_value", "than"),
    ({"seed": 1.5}, "seed", "invalid_value", "integer"),
    ({"num_inference_steps": 10**6}, "num_inference_steps", "above_limit", "at most 60"),
    ({"guidance_scale": 1e9}, "guidance_scale", "invalid_value", "100"),
    ({"true_cfg_scale": 2.0}, "true_cfg_scale", "unsupported_parameter", "FakePipeline"),
    ({"size": "big"}, "size", "invalid_size", "WIDTHxHEIGHT"),
    ({"size": "60000x60000"}, "size", "invalid_size", "at most"),
    ({"size": "99999999x1"}, "size", "invalid_size", "at most"),
    ({"size": "9" * 5000 + "x1"}, "size", "invalid_size", "WIDTHxHEIGHT"),
    ({"size": "100x130"}, "size", "invalid_size", "nearest is 96x128"),
    ({"size": "16x64"}, "size", "invalid_size", "nearest is 64x64"),
    ({"size": "64x64", "height": 64}, "size", "invalid_size", "one of them"),
    ({"height": 100}, "size", "invalid_size", "nearest is 256x96"),
    (
        {"size": "16384x64", "output_format": "webp"},
        "size",
        "invalid_size",
        "WEBP has at most 16383 pixels a side: use png",
    ),
    ({"plan": "patch=0"}, "plan", "invalid_value", "patch"),
    ({"plan": "weights=hosted"}, "plan", "invalid_value", "cfg, patch and a strategy"),
    ({"plan": "stage=1,encoders=one"}, "plan", "invalid_value", "cfg, patch and a strategy"),
    ({"plan": "data=2"}, "plan", "invalid_value", "2 devices"),
    ({"strategy": "nothing"}, "strategy", "invalid_value", "nothing"),
    ({"plan": "strategy=displaced"}, "plan", "invalid_value", "with patch=1 are one"),
    ({"plan": "single", "strategy": "displaced"}, "plan", "invalid_value", "with patch=1 are one"),
    ({"strategy": "displaced"}, "strategy", "invalid_value", "with patch=1 are one"),
]


@pytest.fixture(scope="module")
def strict() -> Any:
    """A client of a server with narrow limits."""
    found = ImageService(
        FakeGenerator(),  # type: ignore[arg-type]
        ServerSettings(limits=RequestLimits(pixels=1 << 20, steps=60, images=2, body_bytes=1 << 16)),
    )
    found.load()
    yield client_of(application(found))
    found.close()


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"].startswith("req_")
    return dict(body["error"])


@pytest.mark.parametrize(("fields", "param", "code", "text"), BAD, ids=lambda each: str(each)[:40])
def test_a_bad_field_is_named(strict: Any, fields: dict[str, Any], param: str, code: str, text: str) -> None:
    prompt = {} if not fields else {"prompt": "a fox"}
    error = error_of(strict.post(PATH, json={**prompt, **fields}), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert text in error["message"]
    assert len(error["message"]) < 700


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"a"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt": NaN}']
)
def test_a_body_that_is_no_object(strict: Any, body: bytes) -> None:
    assert error_of(strict.post(PATH, content=body, headers=JSON), 400)["code"] in ("invalid_json", "invalid_value")


def refusal_of(rules: CallRules, body: dict[str, Any]) -> RequestError | None:
    try:
        rules.call_of(parse_request(json.dumps(body).encode()))
    except RequestError as error:
        return error
    return None


def test_any_body_is_read_or_refused() -> None:
    """Two thousand random bodies: nothing but RequestError, of a client's status."""
    rules = CallRules(model=MODEL, served=ServedModel(model="fake", devices=("cpu",)), limits=RequestLimits())
    random, outcomes = Random(0), Counter[str]()
    values = [None, True, -1, 0, 1, 7, 2**63, 2**70, 0.5, 1e308, "", "auto", "512x512", "\x00", "é" * 99, [], [[]], {}]
    names = [*FIELDS, "sizes", "lora", "", "__class__", "model_config"]
    for _ in range(2000):
        body = {name: random.choice(values) for name in random.sample(names, random.randint(0, 4))}
        body |= {"prompt": "a fox"} if random.random() < 0.7 else {}
        error = refusal_of(rules, body)
        assert error is None or (400 <= error.status < 500 and error.param is not None), body
        outcomes["accepted" if error is None else error.code] += 1
    assert min(outcomes[name] for name in ("accepted", "invalid_value", "unknown_parameter", "invalid_size")) > 2


@pytest.mark.breadth
def test_a_thousand_clients_that_disconnect(app: Any, fake: FakeGenerator, service: ImageService) -> None:
    fake.gate.clear()
    pages = []
    for number in range(1000):
        fake.started.clear()
        assert disconnected(app, {"prompt": "a"}, fake.started.is_set) == []
        if number in (199, 999):
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    until(lambda: not is_busy(service) and service.waiting == 0, "all jobs to be gone")
    assert pages[1] <= 1.02 * pages[0], "memory is flat"


def test_a_response_says_how_often_a_call_was_made_again(
    client: Any, fake: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = fake.generate

    def recovered(job: Any, call: Any) -> Any:
        made = generate(job, call)
        completed = (replace(each, figures=replace(each.figures, recovered=1)) for each in made.completed)
        return replace(made, completed=tuple(completed))

    assert client.post(PATH, json={"prompt": "a"}).json()["patchpar"]["recovered"] == 0
    monkeypatch.setattr(fake, "generate", recovered)
    assert client.post(PATH, json={"prompt": "a", "n": 2}).json()["patchpar"]["recovered"] == 2
    assert 'patchpar_recoveries_total{outcome="recovered"} 2.0' in client.get("/metrics").text
    assert 'patchpar_recoveries_total{outcome="failed"} 0.0' in client.get("/metrics").text


def test_defaults_of_openai_are_accepted(strict: Any) -> None:
    """Also null for whatever was left out, as some clients send it."""
    asked = {"response_format": "b64_json", "background": "auto", "style": "vivid", "moderation": "auto"}
    nothing = dict.fromkeys(FIELDS)
    response = strict.post(PATH, json={**nothing, **asked, "prompt": "a fox", "stream": False, "quality": "high"})
    assert response.status_code == 200, response.text
    assert "quality" in response.headers["warning"]
    events = strict.post(PATH, json={"prompt": "a fox", "quality": "high", "stream": True})
    assert events.headers["warning"] == response.headers["warning"]
    assert "warning" not in strict.post(PATH, json={"prompt": "a fox"}).headers


def test_bodies_are_limited(strict: Any) -> None:
    """Whether their length is declared or not."""
    large = json.dumps({"prompt": "a" * (1 << 16)}).encode()
    assert error_of(strict.post(PATH, content=large, headers=JSON), 413)["code"] == "body_too_large"
    parts = (large[start : start + 1000] for start in range(0, len(large), 1000))
    assert error_of(strict.post(PATH, content=parts, headers=JSON), 413)["code"] == "body_too_large"


def test_a_page_of_another_site_reaches_nothing(strict: Any) -> None:
    plain = strict.post(PATH, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert error_of(plain, 415)["code"] == "unsupported_content_type"
    for path in (PATH, "/health/live"):
        foreign = error_of(strict.post(path, json={"prompt": "a"}, headers={"Host": "evil.example:8000"}), 400)
        assert foreign["code"] == "foreign_host"
        assert "'evil.example:8000'" in foreign["message"]
        assert "127.0.0.1" in foreign["message"]
    for own in ("127.0.0.1:8000", "LocalHost", "[::1]:8000", "[::1]"):
        assert strict.get("/health/live", headers={"Host": own}).status_code == 200
    for none in ("", "[::1", "127.0.0.1.evil.example", "evil.example:127.0.0.1"):
        assert strict.get("/health/live", headers={"Host": none}).status_code == 400
    assert 'code="400",route="none"' in strict.get("/metrics").text
    assert strict.options(PATH, headers={"Origin": "http://evil.example"}).status_code == 405


@pytest.mark.parametrize("origin", ["http://[", "null", "http://other.example"])
def test_origins_of_forms(client: Any, origin: str) -> None:
    form = {"files": {"image": ("a.png", b"none")}, "data": {"prompt": "a"}}
    response = client.post("/v1/images/edits", **form, headers={"Origin": origin})
    assert error_of(response, 403)["code"] == "foreign_origin"


def test_models_and_paths(client: Any) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["fake"]  # not the folder's path
    model = client.get("/v1/models/fake").json()
    assert (model["object"], model["tasks"], model["size"]) == ("model", ["generations"], "256x256")
    assert error_of(client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"
    other = error_of(client.post(PATH, json={"prompt": "a", "model": "dall-e-3"}), 404)
    assert (other["code"], other["param"]) == ("model_not_found", "model")
    assert error_of(client.get("/v1/images"), 404)["code"] == "not_found"
    assert error_of(client.get(PATH), 405)["code"] == "method_not_allowed"
    assert client.get("/version").json()["version"]


def test_keys(fake: Any) -> None:
    """Everything but health and version needs one of the keys; a wrong one is refused before the body is read."""
    service = ImageService(fake, ServerSettings(keys=ApiKeys.of("another-key-of-someone", KEY)))
    service.load()
    app = application(service)
    for wrong in (None, "", KEY[:-1], KEY + "x", "another", "ключ"):
        for path in ("/v1/models", "/metrics", "/nothing", "/version/nothing"):
            assert error_of(client_of(app, wrong).get(path), 401)["code"] == "invalid_api_key"
        assert client_of(app, wrong).get("/health/ready").status_code == 200
    assert client_of(app, wrong).post(PATH, content=b"{").status_code == 401
    basic = client_of(app).get("/v1/models", headers={"Authorization": f"Basic {KEY}"})
    assert basic.status_code == 401
    assert client_of(app, KEY).get("/v1/models").status_code == 200
    assert client_of(app, KEY).post(PATH, json={"prompt": "a fox"}).status_code == 200
    service.close()


def test_a_full_queue(client: Any, fake: FakeGenerator, service: ImageService) -> None:
    """One request runs and two wait: the next one is told when to come again, and the three are done."""
    fake.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(client.post, PATH, json={"prompt": "a"})
        assert fake.started.wait(20)
        others = [pool.submit(client.post, PATH, json={"prompt": "a"}) for _ in range(2)]
        until(lambda: 'patchpar_queue_length{priority="0"} 2.0' in client.get("/metrics").text, "two to wait")
        response = client.post(PATH, json={"prompt": "a"})
        assert error_of(response, 503)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        fake.gate.set()
        assert [each.result(20).status_code for each in (first, *others)] == [200] * 3


def test_a_client_that_disconnects(app: Any, client: Any, fake: FakeGenerator, service: ImageService) -> None:
    """Its job is cancelled while it runs, and dropped while it waits; the next request is done."""
    fake.gate.clear()
    assert disconnected(app, {"prompt": "runs"}, fake.started.is_set) == []
    until(lambda: not is_busy(service), "the call to be cancelled")
    fake.started.clear()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, PATH, json={"prompt": "stays"})
        assert fake.started.wait(20)
        assert disconnected(app, {"prompt": "waits"}, lambda: service.waiting == 1) == []
        assert service.waiting == 0
        fake.gate.set()
        assert running.result(20).status_code == 200
    assert [call.arguments["prompt"] for call in fake.calls] == ["runs", "stays"]
    assert 'code="499"' in client.get("/metrics").text
    assert not service.metrics.unsent.names, "the end of the server waits for what is in it"


def test_a_response_that_has_begun_is_not_answered_twice(app: Any) -> None:
    """An error in its middle ends the connection; it cannot have another status."""

    async def parts() -> Any:
        yield b"begun"
        raise ValueError("/secret")

    sent: list[Any] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_note(message: Any) -> None:
            sent.append(message)
            await send(message)

        await app(scope, receive, send_and_note)

    app.add_api_route("/broken", lambda: StreamingResponse(parts()), methods=["GET"])
    with pytest.raises(Exception, match=r"/secret|in a TaskGroup"):  # for the server, which closes the connection
        TestClient(noted, base_url=HOME).get("/broken")
    assert [(each.get("status"), each.get("body")) for each in sent] == [(200, None), (None, b"begun")]


def test_loading_and_draining(fake: Any) -> None:
    service = ImageService(fake, ServerSettings())
    client = client_of(application(service))
    assert error_of(client.post(PATH, json={"prompt": "a"}), 503)["code"] == "loading"
    assert client.get("/health/ready").status_code == 503
    assert client.get("/health/live").status_code == 200
    service.load()
    assert client.get("/health/ready").status_code == 200
    fake.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.post, PATH, json={"prompt": "a"})
        assert fake.started.wait(20)
        drained = pool.submit(service.drain, 20.0)
        until(lambda: service.state == "draining", "it to drain")
        response = client.post(PATH, json={"prompt": "a"})
        assert error_of(response, 503)["code"] == "draining"
        assert response.headers["retry-after"]
        assert client.get("/health/ready").json() == {"status": "draining"}
        fake.gate.set()
        assert drained.result(20)
        assert running.result(20).status_code == 200
    service.close()
    assert fake.is_closed


def test_what_does_not_finish_in_time_is_told_so(client: Any, fake: FakeGenerator, service: ImageService) -> None:
    fake.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, PATH, json={"prompt": "a"})
        assert fake.started.wait(20)
        assert not service.drain(0.0)
        service.close()
        assert error_of(running.result(20), 503)["code"] == "draining"


def test_lost_workers(client: Any, fake: FakeGenerator, service: ImageService) -> None:
    """The request fails, the server is not ready, starts them again by itself, and then is."""
    fake.error = WorkerDied("rank 1 ended\nTraceback: /secret/path", rank=1)
    fake.may_warm.clear()
    error = error_of(client.post(PATH, json={"prompt": "a"}), 500)
    assert (error["code"], error["type"]) == ("worker_lost", "server_error")
    assert "secret" not in error["message"]
    assert client.get("/health/ready").json() == {"status": "lost"}
    fake.may_warm.set()
    until(lambda: client.get("/health/ready").status_code == 200, "the workers")
    assert fake.warmed == 2
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200


def test_what_does_not_fit_is_refused_with_figures(client: Any, fake: FakeGenerator) -> None:
    """Those of devices, and nothing else of the message."""
    fake.error = WorkerOutOfMemory("/secret", free="rank 0 0.50 GB of its device")
    error = error_of(client.post(PATH, json={"prompt": "a"}), 422)
    assert error["code"] == "out_of_memory"
    assert "rank 0 0.50 GB of its device" in error["message"]
    assert "secret" not in error["message"]


class OutOfMemoryError(RuntimeError):
    """Stands for torch's."""


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (OutOfMemoryError("/secret"), 422, "out_of_memory"),
        (WorkerOutOfMemory("/secret"), 422, "out_of_memory"),
        (RetriesExhausted("/secret"), 500, "worker_lost"),
        (PlanError("this size is no size"), 400, "invalid_value"),
        (LaunchError("/secret"), 503, "workers_unavailable"),
        (ValueError("/secret"), 500, "failed"),
    ],
    ids=lambda each: str(each),
)
def test_failures(client: Any, fake: FakeGenerator, raised: Exception, status: int, code: str) -> None:
    fake.error = raised
    error = error_of(client.post(PATH, json={"prompt": "a"}), status)
    assert error["code"] == code
    assert "secret" not in error["message"]
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200


def test_metrics_have_labels_of_closed_sets(client: Any) -> None:
    """Whatever clients ask for, no value of theirs becomes a label."""
    for path in ("/v1/models/strange", "/strange", "/v1/strange"):
        client.get(path)
    client.post(PATH, json={"prompt": "a fox", "user": "strange"})
    client.request("STRANGE", PATH)
    text = client.get("/metrics").text
    assert "strange" not in text.lower()
    assert 'patchpar_requests_total{code="200",route="/v1/images/generations"} 1.0' in text
    assert 'patchpar_state{state="ready"} 1.0' in text
    routes = set(re.findall(r'route="([^"]*)"', text))
    assert routes <= {PATH, "/v1/models", "/v1/models/{name:path}", "/metrics", "none"}


def test_metrics_count_what_ranks_report() -> None:
    """A request on the last two of four devices, whose ranks are theirs."""
    metrics, figures = ServerMetrics(), list[RankStats]()
    for rank in (2, 3):
        waited, sent = {"halo": 0.25 * rank}, {"halo": 10 * rank, "kv": 5}
        step = StepStats(bytes_sent=sent, bytes_received={}, seconds_waited=waited)
        facts: dict[str, Any] = {"bytes_sent": sent, "bytes_received": {}, "seconds_waited": waited}
        figures.append(RankStats(rank=rank, device="cpu", steps=(step,) * 3, **facts))
    metrics.observe(0.5, 256 * 256, [Run(plan=Plan(patch=2), seconds=2.0, ranks=tuple(figures))] * 2)
    lines = metrics.text().decode().splitlines()
    for name, value in (("queue_seconds", 0.5), ("image_seconds", 4.0)):
        assert f"patchpar_{name}_sum {value}" in lines
    assert "patchpar_steps_total 6.0" in lines
    assert sorted(line for line in lines if line.startswith("patchpar_bytes_sent_total{")) == [
        'patchpar_bytes_sent_total{kind="halo",rank="2"} 40.0',
        'patchpar_bytes_sent_total{kind="halo",rank="3"} 60.0',
        'patchpar_bytes_sent_total{kind="kv",rank="2"} 10.0',
        'patchpar_bytes_sent_total{kind="kv",rank="3"} 10.0',
    ]
    assert sorted(line for line in lines if line.startswith("patchpar_wait_seconds_total{")) == [
        'patchpar_wait_seconds_total{kind="halo",rank="2"} 1.0',
        'patchpar_wait_seconds_total{kind="halo",rank="3"} 1.5',
    ]


def test_beyond_this_machine_there_is_a_key(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--api-key-file"):
        ServerSettings(host="0.0.0.0")
    file = tmp_path / "keys"
    for text, reason in (("", "no key"), ("# none\n", "no key"), ("short\n", "16 characters"), ("a b" * 9, "blanks")):
        file.write_text(text)
        with pytest.raises(PlanError, match=reason):
            ApiKeys.read(file)
    with pytest.raises(PlanError, match="No such file"):
        ApiKeys.read(tmp_path / "nothing")
    file.write_text(f"# mine\n{KEY}\n\n")
    keys = ApiKeys.read(file)
    assert ServerSettings(host="0.0.0.0", keys=keys).keys.accept(f"Bearer {KEY}".encode())
    assert not keys.accept(b"Bearer")
    assert KEY not in repr(keys)
    file.write_text(f"{KEY}\n", encoding="utf-8-sig")  # with the mark that some editors begin a file with
    assert ApiKeys.read(file).accept(f"Bearer {KEY}".encode())


def test_every_code_of_an_error_is_on_the_page() -> None:
    repository = Path(__file__).parents[2]
    sources = "".join(path.read_text() for path in (repository / "patchpar/serving").rglob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', sources))
    table = (repository / "docs/howto/serve.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    assert codes - set(re.findall(r"`(\w+)`", table)) == set()
    assert "rank_needed" in codes


def test_a_model_that_exits_fails_its_request_only(client: Any, fake: FakeGenerator) -> None:
    """The thread of the queue would end, with its devices and all who wait for them."""
    fake.error = SystemExit(3)  # type: ignore[assignment]  # no Exception
    assert error_of(client.post(PATH, json={"prompt": "a"}), 500)["code"] == "failed"
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("raised", "repeats"),
    [
        (ValueError("odd"), False),
        (RequestError("late", status=504, code="deadline_missed", is_final=True), False),
        (Journaled("job_1"), False),
        (WorkerDied("rank 1 ended"), True),
        (ServerEnding(), True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_would_fail_again_or_be_made_twice_is_not_repeated(raised: Exception, repeats: bool) -> None:
    """By OpenAI's client, which asks the header first and then the status."""
    response = error_response(request_error_of(raised, "req_1"))
    found = httpx.Response(response.status_code, headers=dict(response.headers))
    with openai.OpenAI(api_key="none") as client:
        assert client._should_retry(found) is repeats
