"""Requests that are suspended: for a more urgent one, and at the end of a server, for the next one to go on with."""

from __future__ import annotations

import errno
import gc
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from patchpar import ParallelPipeline, PlanError
from patchpar.serving import service as service_module
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.image_request import parse_request
from patchpar.serving.job import Cancelled, Job, Suspended
from patchpar.serving.job_queue import WorkQueue
from patchpar.serving.kept_requests import take_up
from patchpar.serving.request_journal import RequestJournal
from patchpar.serving.scheduler import JobFacts, JobScheduler
from patchpar.serving.scheduling.learnt_costs import CallShape, LearntCosts
from patchpar.serving.scheduling.policies import POLICIES
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from patchpar.serving.unfinished_call import UnfinishedCall
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_http import error_of
from tests.serving.test_images import SMALL, generated, image_of

STEPS = 8
BODY = {**SMALL, "num_inference_steps": STEPS, "seed": 5}
SHAPE = CallShape(64 * 64)


class Resumed:
    """Notes the calls of a pipeline that go on where another one was."""

    def __init__(self, pipe: ParallelPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        submit = pipe.submit

        def noted(*args: Any, resume: Any = None, **kwargs: Any) -> Any:
            if resume is not None:
                self.calls.append(resume.num_calls)
            return submit(*args, resume=resume, **kwargs)

        monkeypatch.setattr(ParallelPipeline, "submit", lambda _, *args, **kwargs: noted(*args, **kwargs))


def test_a_suspended_request_goes_on_where_it_was(
    embedded: ImageService, pipe: ParallelPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed, before = Resumed(pipe, monkeypatch), suspensions(embedded)
    queued = embedded.submit(parse_request(json.dumps({**BODY, "n": 2, "num_inference_steps": 8}).encode()))
    for image in range(2):
        until(lambda: queued.done_steps >= 8 * image + 2, "steps")  # noqa: B023
        queued.suspend()
        until(lambda: queued.suspensions == image + 1, "it to wait again")  # noqa: B023
    found = queued.outcome.result(60)
    assert len(resumed.calls) == 2
    assert min(resumed.calls) >= 2, "denoiser calls that were not made again"
    assert suspensions(embedded) - before == 2
    assert len(found.runs) == 2, "also of the image that was finished before the second suspension"
    for number, each in enumerate(found.images):
        assert np.array_equal(np.asarray(each), generated(pipe, 5 + number, num_inference_steps=8))


def suspensions(service: ImageService) -> float:
    """How many the server has counted."""
    return float(re.findall(r"^patchpar_suspensions_total (\S+)$", service.metrics.text().decode(), re.MULTILINE)[0])


def test_the_deadline_policy_suspends_the_one_with_most_slack() -> None:
    costs = LearntCosts()
    costs.observe(SHAPE, 1, 1, 0.2)
    queue = WorkQueue(max_waiting=8, choose=JobScheduler(POLICIES["deadline"], 1, costs).choose)
    order, goes_on = list[str](), threading.Event()

    def long(job: Job) -> str:
        order.append("long again" if job.suspensions else "long")
        while not job.suspensions and not goes_on.wait(0.005):
            job.check()
        return "long"

    first = queue.append(long, facts=JobFacts(shape=SHAPE, steps=1000, degrees=(1,)))
    until(lambda: order == ["long"], "the long one")
    deadline = 10.0 + time.monotonic()
    urgent = JobFacts(shape=SHAPE, steps=1, degrees=(1,), deadline=deadline)
    second = queue.append(lambda job: order.append("urgent"), facts=urgent)
    second.outcome.result(20)
    assert first.outcome.result(20) == "long"
    assert order == ["long", "urgent", "long again"]
    assert (first.suspensions, second.suspensions) == (1, 0)
    queue.close()


def test_a_request_that_is_cancelled_just_before_it_waits_again_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold its turn, and be written down for the next server."""

    def suspends(job: Job) -> None:
        raise Suspended

    job = Job(suspends)
    change = job._change

    def cancelled_before(**changes: Any) -> bool:
        if changes.get("state") == "waiting":
            job.cancel()
        return change(**changes)

    monkeypatch.setattr(job, "_change", cancelled_before)
    job.run()
    assert job.view.state == "cancelled"
    assert isinstance(job.outcome.exception(0), Cancelled)


def test_a_request_that_waits_already_is_not_suspended_once_more() -> None:
    """As a policy may do before the queue has taken its devices back: it would stop again as soon as it goes on."""
    seen = list[int]()

    def suspends_once(job: Job) -> str:
        seen.append(job.suspensions)
        if job.suspensions:
            job.check()
            return "done"
        raise Suspended

    queue = WorkQueue(max_waiting=2)
    gate = threading.Event()
    queue.append(lambda _: gate.wait(20))
    job = queue.append(suspends_once)
    again = [job.suspend]

    def suspends_again() -> None:
        if job.view.note == "suspended" and again:
            again.pop()()

    with job.listening(suspends_again):
        gate.set()
        assert job.outcome.result(20) == "done"
    assert (seen, job.suspensions, job.is_suspending) == ([0, 1], 1, False)
    queue.close()


def test_what_cannot_go_on_is_not_suspended() -> None:
    costs = LearntCosts()
    costs.observe(SHAPE, 1, 1, 0.2)
    queue = WorkQueue(max_waiting=8, choose=JobScheduler(POLICIES["deadline"], 1, costs).choose)
    gate, order = threading.Event(), list[str]()
    queue.append(
        lambda job: (gate.wait(20), order.append("long")),
        facts=JobFacts(shape=SHAPE, steps=1000, degrees=(1,), can_suspend=False),
    )
    until(lambda: bool(queue._running), "it to run")
    facts = JobFacts(shape=SHAPE, steps=1, degrees=(1,), deadline=10.0 + time.monotonic())
    second = queue.append(lambda job: order.append("urgent"), facts=facts)
    assert not queue._running[0].is_suspending
    gate.set()
    second.outcome.result(20)
    assert order == ["long", "urgent"]
    queue.close()


def server_of(pipe: ParallelPipeline, journal: Path) -> ImageService:
    generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu",)))
    generator.open = lambda: generator.adopt(pipe)  # type: ignore[method-assign]
    generator.close = lambda: None  # type: ignore[method-assign]
    found = ImageService(generator, ServerSettings(journal=journal))
    found.load()
    return found


def test_the_next_server_goes_on_with_what_one_has_not_finished(
    pipe: ParallelPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that runs, one that waits, and a client who waits: none of their finished denoiser calls is made again."""
    first = server_of(pipe, tmp_path)
    client = client_of(application(first))
    running = client.post(f"{PATH}?async=true", json={**BODY, "n": 2}, headers={"Idempotency-Key": "mine"}).json()["id"]
    waiting = client.post(f"{PATH}?async=true", json={**BODY, "seed": 9, "num_inference_steps": 2}).json()["id"]
    answers: list[Any] = []
    asks = threading.Thread(target=lambda: answers.append(client.post(PATH, json={**SMALL, "seed": 11})))
    asks.start()
    until(lambda: first.waiting == 2, "all to come")
    until(lambda: client.get(f"/v1/jobs/{running}").json()["step"] >= 3, "three steps")
    assert not first.drain(0.0)
    first.close()
    asks.join(20)
    view = client.get(f"/v1/jobs/{running}").json()
    assert (view["status"], view["error"]) == ("in_progress", None), "who polls goes on polling"
    error = error_of(answers[0], 503)
    moved = error["message"].rpartition("/")[2]
    assert (error["code"], moved.startswith("job_")) == ("draining", True)

    resumed = Resumed(pipe, monkeypatch)
    second = server_of(pipe, tmp_path)
    assert take_up(second) == 3
    client = client_of(application(second))
    try:
        again = client.post(f"{PATH}?async=true", json={**BODY, "n": 2}, headers={"Idempotency-Key": "mine"})
        assert again.json()["id"] == running
        for name, seeds, steps in ((running, (5, 6), STEPS), (waiting, (9,), 2), (moved, (11,), 2)):
            kept = second.kept.get(name, "job", "")
            kept.ended.result(120)
            result = client.get(f"/v1/jobs/{name}").json()["result"]
            for seed, each in zip(seeds, result["data"], strict=True):
                assert np.array_equal(image_of(each["b64_json"]), generated(pipe, seed, num_inference_steps=steps))
        assert resumed.calls[0] >= 3
        until(lambda: not list(tmp_path.iterdir()), "the journal to be empty")
    finally:
        second.close()


def test_a_request_in_a_long_denoiser_call_is_written_as_it_was_before_it(
    pipe: ParallelPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not wait until the call has ended, and what was made before is not lost."""
    first = server_of(pipe, tmp_path)
    client = client_of(application(first))
    name = client.post(f"{PATH}?async=true", json=BODY).json()["id"]
    until(lambda: client.get(f"/v1/jobs/{name}").json()["step"] >= 3, "three steps")
    monkeypatch.setattr(service_module, "SUSPEND_SECONDS", 0.0)
    monkeypatch.setattr(Job, "suspend", lambda job: None)  # it comes to no further denoiser call
    first.close()
    (entry,) = RequestJournal(tmp_path).entries("embedded")
    assert entry.kept.suspended is not None
    assert 3 <= entry.kept.suspended.num_calls <= STEPS


def test_an_image_that_is_finished_during_a_snapshot_is_not_made_twice() -> None:
    """Else the next server would go on with the second image from the denoiser calls of the first one."""
    unfinished = UnfinishedCall()
    image: Any = SimpleNamespace(image_index=0)
    ends = threading.Thread(target=unfinished.finish, args=(image,))

    class Ends:
        def snapshot(self) -> str:
            ends.start()
            ends.join(0.05)
            return "calls of the first image"

    unfinished.begin(Ends())  # type: ignore[arg-type]
    found = unfinished.snapshot()
    ends.join()
    assert (found.done, found.suspended) == ([], "calls of the first image")
    after = unfinished.snapshot()
    assert (after.done, after.suspended) == ([image], None)


def test_a_request_that_was_suspended_keeps_nothing_of_its_call() -> None:
    """Whose arguments may be images of many pixels, while it waits."""
    unfinished = UnfinishedCall()
    call: Any = SimpleNamespace(suspend=lambda timeout: "calls of the image")
    unfinished.begin(call)
    unfinished.suspend(call)
    assert unfinished.snapshot().suspended == "calls of the image"
    assert call not in gc.get_referents(unfinished, vars(unfinished))


@pytest.fixture
def journaled(fake: Any, tmp_path: Path) -> tuple[Any, Path]:
    """A folder with a request of the fake model, and its ID."""
    service = ImageService(fake, ServerSettings(journal=tmp_path))
    service.load()
    fake.gate.clear()
    client = client_of(application(service))
    name = client.post(f"{PATH}?async=true", json={"prompt": "a fox", "size": "64x64"}).json()["id"]
    assert fake.started.wait(20)
    service.close()
    fake.gate.set()
    return name, tmp_path


def test_a_journal_of_another_model_is_refused(journaled: Any) -> None:
    name, folder = journaled
    with pytest.raises(PlanError, match=f"{name} is for the model fake"):
        list(RequestJournal(folder).entries("other"))
    assert [each.id for each in RequestJournal(folder).entries("fake")] == [name]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "id": "../../x"}'])
def test_a_broken_entry_stays_and_the_others_are_taken_up(journaled: Any, text: str) -> None:
    name, folder = journaled
    broken = folder / f"job_{'0' * 24}"
    broken.mkdir()
    (broken / "request.json").write_text(text)
    (folder / "notes.txt").write_text("no entry")
    service = ImageService(FakeGenerator(), ServerSettings(journal=folder))  # type: ignore[arg-type]
    service.load()
    assert take_up(service) == 1
    client = client_of(application(service))
    until(lambda: client.get(f"/v1/jobs/{name}").json()["status"] == "completed", "the whole one")
    client.delete(f"/v1/jobs/{name}")
    service.close()
    assert {each.name for each in folder.iterdir()} == {broken.name, "notes.txt"}


def test_what_a_killed_server_has_left_is_cleared_up_without_locks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a network file system: a request that was being replaced would be lost."""

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    name = f"job_{'0' * 24}"
    (tmp_path / f".{name}.old").mkdir()
    (tmp_path / f".{name}.part").mkdir()
    RequestJournal(tmp_path).close()
    assert "cannot be locked (No locks available)" in caplog.text
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_journal_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such folder"):
        RequestJournal(tmp_path / "nothing")
