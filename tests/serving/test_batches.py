"""Requests of small images that are alike are made in one call, if each image is what it would be alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from patchpar import ParallelPipeline, PlanError, WorkerDied
from patchpar.cli.flag_values import batch_of
from patchpar.errors import WorkerOutOfMemory
from patchpar.plan.plan import Plan
from patchpar.serving import generation
from patchpar.serving.batching import batch_key, error_of_batch
from patchpar.serving.generated import GeneratedImages
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.image_call import ImageCall
from patchpar.serving.job import Job
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_http import error_of
from tests.serving.test_images import SMALL, generated, image_of

LATER = f"{PATH}?async=true"


class BatchGenerator(FakeGenerator):
    """Makes batches of the images that it would make alone. `batches`: the prompts of each."""

    def __init__(self) -> None:
        super().__init__(ServedModel(model="/models/fake", devices=("cpu",), batch=3))
        self.can_batch = True
        self.batches: list[list[str]] = []

    def generate_batch(self, job: Job, calls: Sequence[ImageCall]) -> list[GeneratedImages]:
        self.batches.append([call.arguments["prompt"] for call in calls])
        return [super(BatchGenerator, self).generate(job, call) for call in calls]


@pytest.fixture
def batches() -> Iterator[tuple[Any, Any, ImageService]]:
    fake: Any = BatchGenerator()
    service = ImageService(fake, ServerSettings(max_queue=20))
    service.load()
    yield client_of(application(service)), fake, service
    fake.gate.set()
    service.close()


def queued(client: Any, fake: Any, service: ImageService, bodies: list[dict[str, Any]]) -> list[str]:
    """IDs of jobs that wait behind one that runs."""
    fake.gate.clear()
    client.post(LATER, json={"prompt": "first", "size": "64x64"})
    assert fake.started.wait(20)
    names = [client.post(LATER, json={"size": "64x64", **body}).json()["id"] for body in bodies]
    until(lambda: service.waiting == len(bodies), "all to wait")
    return names


def ended(client: Any, names: list[str]) -> list[str]:
    for name in names:
        until(lambda: client.get(f"/v1/jobs/{name}").json()["completed_at"] is not None, name)  # noqa: B023
    return [client.get(f"/v1/jobs/{name}").json()["status"] for name in names]


ALONE = ImageCall(arguments={"prompt": "a", "steps": 3}, seed=1, count=1, size=(64, 64))


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": {"prompt": "a", "steps": 4}},
        {"arguments": {"prompt": "a", "steps": 3, "negative_prompt": "b"}},
        {"plan": Plan(patch=2)},
        {"degree": 2},
        {"loras": {"ink": 1.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_acts_on_a_whole_call_is_the_same_in_a_batch(changes: dict[str, Any]) -> None:
    same = replace(ALONE, arguments={"prompt": "b", "steps": 3}, seed=2)
    assert batch_key(same, is_exact=False) == batch_key(ALONE, is_exact=False)
    assert batch_key(replace(ALONE, **changes), is_exact=False) not in (None, batch_key(ALONE, is_exact=False))


@pytest.mark.parametrize("changes", [{"count": 2}, {"partial_images": 1}, {"size": (768, 768)}], ids=str)
def test_what_is_made_alone(changes: dict[str, Any]) -> None:
    assert batch_key(replace(ALONE, **changes), is_exact=False) is None
    assert batch_key(ALONE, is_exact=True) is None


def test_requests_that_are_alike_are_joined(batches: Any) -> None:
    client, fake, service = batches
    bodies: list[dict[str, Any]] = [
        {"prompt": "a", "seed": 1},
        {"prompt": "b", "seed": 2},
        {"prompt": "other size", "size": "96x64"},
        {"prompt": "other steps", "num_inference_steps": 3},
        {"prompt": "two", "n": 2},
        {"prompt": "exact", "exactness": "exact"},
        {"prompt": "c"},
        {"prompt": "d"},
        {"prompt": "large", "size": "768x768"},
    ]
    names = queued(client, fake, service, bodies)
    fake.gate.set()
    assert ended(client, names) == ["completed"] * len(bodies)
    assert fake.batches == [["a", "b", "c"]]
    made = client.get(f"/v1/jobs/{names[1]}").json()["result"]
    assert (made["patchpar"]["seed"], len(made["data"])) == (2, 1)
    metrics = client.get("/metrics").text
    assert "patchpar_batch_size_sum 3.0" in metrics
    assert f"patchpar_queue_seconds_count {len(bodies) + 1}.0" in metrics, "and the one that ran before them"


def test_an_idle_server_waits_for_more(batches: Any) -> None:
    """At most as long as it may: the first of two is not made alone, and a full batch starts at once."""
    client, fake, service = batches
    service.scheduler.batch_wait = 30.0
    names = [client.post(LATER, json={"size": "64x64", "prompt": prompt}).json()["id"] for prompt in "ab"]
    time.sleep(0.1)
    assert service.waiting == 2
    names.append(client.post(LATER, json={"size": "64x64", "prompt": "c"}).json()["id"])
    assert ended(client, names) == ["completed"] * 3
    assert fake.batches == [["a", "b", "c"]]
    service.scheduler.batch_wait = 0.05
    begun = time.monotonic()
    assert client.post(PATH, json={"size": "64x64", "prompt": "alone"}).status_code == 200
    assert time.monotonic() - begun > 0.05
    assert len(fake.batches) == 1


@pytest.mark.parametrize(
    ("batch", "wait", "message"), [(1, 0.05, "add --batch"), (4, -0.001, "to 10000"), (4, 10.001, "use 0, for none")]
)
def test_waits_that_are_refused(batch: int, wait: float, message: str) -> None:
    with pytest.raises(PlanError, match=f"--batch-wait-ms .*{message}"):
        ServedModel(model="a", devices=("cpu",), batch=batch, batch_wait=wait)


@pytest.mark.parametrize("text", ["many", "", "-1", "²", "9" * 5000], ids=lambda text: text[:4])
def test_batches_that_are_refused(text: str) -> None:
    """Python itself reads no number of thousands of digits."""
    with pytest.raises(PlanError, match=f"--batch {text[:80]}: use auto, or the number of requests"):
        batch_of(text)
    assert (batch_of("auto"), batch_of("4")) == (8, 4)


def test_a_batch_teaches_nothing_of_one_image(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, fake, service = batches
    learnt: list[Any] = []
    monkeypatch.setattr(service.scheduler.costs, "observe", lambda *facts: learnt.append(facts))
    names = queued(client, fake, service, [{"prompt": "a"}, {"prompt": "b"}])
    fake.gate.set()
    assert ended(client, names) == ["completed"] * 2
    assert fake.batches == [["a", "b"]]
    assert len(learnt) == 1, "of the first request, which was made alone"


def test_one_of_a_batch_that_is_cancelled_leaves_the_others(batches: Any) -> None:
    client, fake, service = batches
    names = queued(client, fake, service, [{"prompt": "a"}, {"prompt": "b"}])
    gate = threading.Event()
    make = fake.generate_batch

    def waits(job: Job, calls: Sequence[ImageCall]) -> Any:
        job.when_cancelled(gate.set)
        client.post(f"/v1/jobs/{names[0]}/cancel")
        assert not gate.is_set(), "the other one wants it"
        return make(job, calls)

    fake.generate_batch = waits
    fake.gate.set()
    assert ended(client, [names[1]]) == ["completed"]
    assert not gate.is_set()


def test_an_error_is_that_of_all(batches: Any) -> None:
    client, fake, service = batches
    names = queued(client, fake, service, [{"prompt": "a"}, {"prompt": "b"}])

    def fails(job: Job, calls: Sequence[ImageCall]) -> Any:
        raise WorkerDied("rank 0 ended", rank=0)

    fake.generate_batch = fails
    fake.gate.set()
    assert ended(client, names) == ["failed", "failed"]
    assert client.post(PATH, json={"prompt": "c"}).status_code == 200


@pytest.mark.parametrize("late", [0, 1], ids=["the first", "one that joins"])
def test_one_of_a_batch_that_is_late_ends_alone(batches: Any, late: int) -> None:
    client, fake, service = batches
    bodies: list[dict[str, Any]] = [{"prompt": "a", "priority": 1}, {"prompt": "b"}, {"prompt": "c"}]
    names = queued(client, fake, service, bodies)
    job = service.kept.get(names[late], "job", "").job
    job.facts = replace(job.facts, deadline=time.monotonic() - 1)
    fake.gate.set()
    wanted = ["failed" if number == late else "completed" for number in range(3)]
    assert ended(client, names) == wanted
    assert client.get(f"/v1/jobs/{names[late]}").json()["error"]["code"] == "deadline_missed"
    assert fake.batches == [[body["prompt"] for number, body in enumerate(bodies) if number != late]]


def test_images_that_do_not_fit_together_are_made_alone(batches: Any) -> None:
    client, fake, service = batches
    names = queued(client, fake, service, [{"prompt": "a"}, {"prompt": "b"}])
    tried: list[int] = []

    def fails(job: Job, calls: Sequence[ImageCall]) -> Any:
        tried.append(len(calls))
        raise WorkerOutOfMemory("no memory is left")

    fake.generate_batch = fails
    fake.gate.set()
    assert ended(client, names) == ["completed", "completed"]
    assert tried == [2]


def test_who_reads_events_gets_the_image_of_a_batch(batches: Any) -> None:
    client, fake, service = batches
    queued(client, fake, service, [{"prompt": "a"}])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, PATH, json={"prompt": "b", "size": "64x64", "stream": True})
        until(lambda: service.waiting == 2, "it to wait")
        fake.gate.set()
        assert "event: image_generation.completed" in answer.result(20).text
    assert fake.batches == [["a", "b"]]


def test_a_batch_that_is_suspended_starts_again(batches: Any) -> None:
    client, fake, service = batches
    names = queued(client, fake, service, [{"prompt": "a"}, {"prompt": "b"}])
    make, times = fake.generate_batch, list[int]()

    def once(job: Job, calls: Sequence[ImageCall]) -> Any:
        times.append(len(calls))
        if len(times) == 1:
            job.suspend()
            job.check()
        return make(job, calls)

    fake.generate_batch = once
    fake.gate.set()
    assert ended(client, names) == ["completed", "completed"]
    assert times == [2, 2]


def server_of(pipe: ParallelPipeline) -> ImageService:
    generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu",), batch=4))
    generator.open = lambda: generator.adopt(pipe)  # type: ignore[method-assign]
    generator.close = lambda: None  # type: ignore[method-assign]
    found = ImageService(generator, ServerSettings())
    found.load()
    return found


def test_images_of_a_batch_are_those_made_alone(pipe: ParallelPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server_of(pipe)
    client = client_of(application(service))
    sizes: list[int] = []
    observe = service.metrics.batches.observe
    monkeypatch.setattr(service.metrics.batches, "observe", lambda size: (sizes.append(size), observe(size)))
    try:
        assert service.scheduler.batch == 4
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(client.post, PATH, json={**SMALL, "num_inference_steps": 8})
            until(lambda: service.waiting == 0 and bool(service._queue._running), "the first to run")
            asked = [pool.submit(client.post, PATH, json={**SMALL, "seed": seed}) for seed in (1, 2, 3)]
            assert first.result(60).status_code == 200
            answers = [each.result(60).json() for each in asked]
        for seed, answer in zip((1, 2, 3), answers, strict=True):
            off = np.abs(image_of(answer["data"][0]["b64_json"]).astype(int) - generated(pipe, seed)).max()
            assert off <= 1
            assert answer["patchpar"]["seed"] == seed
        assert max(sizes) >= 2
    finally:
        service.close()


def test_a_model_whose_images_differ_in_a_batch_is_not_joined(
    pipe: ParallelPipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A control: they differ by more than they may."""
    monkeypatch.setattr(generation, "error_of_batch", lambda *_: 1.01 * generation.BOUND)
    service = server_of(pipe)
    try:
        assert service.scheduler.batch == 1
    finally:
        service.close()
    assert "requests are not joined: images of a batch differ by" in caplog.text


def test_the_error_of_a_batch_is_that_of_its_worst_image() -> None:
    def made(arguments: Mapping[str, Any]) -> list[Any]:
        """A second image of a call has a brightness of 1.1 instead of 1."""
        assert arguments["output_type"] == "np"
        several = isinstance(arguments["prompt"], list)
        return [np.full((4, 4, 3), 1.0 + 0.1 * number) for number in range(2 if several else 1)]

    assert error_of_batch(made, {"prompt": "a"}, (64, 64)) == pytest.approx(0.1)


def test_what_is_no_exactness(client: Any) -> None:
    assert error_of(client.post(PATH, json={"prompt": "a", "exactness": "most"}), 400)["param"] == "exactness"
