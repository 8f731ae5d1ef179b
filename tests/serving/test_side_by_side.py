"""Requests that leave devices free run at the same time, in order, each with the image that it has alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from patchpar.plan.plan import Plan
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.job import Job
from patchpar.serving.job_queue import JobStart, WorkQueue
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of, until

SECONDS = 20.0
FOUR = ("cpu",) * 4


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    found = WorkQueue(max_waiting=8, capacity=4)
    yield found
    found.close(timeout=0.0)


class Work:
    """Jobs that run until they are let go, by the order in which they began."""

    def __init__(self, queue: WorkQueue) -> None:
        self.queue, self.begun = queue, list[str]()
        self.ends: dict[str, threading.Event] = {}

    def add(self, name: str, takes: int) -> Job:
        self.ends[name] = threading.Event()

        def work(job: Job) -> str:
            self.begun.append(name)
            while not self.ends[name].wait(0.005):
                job.check()
            return name

        return self.queue.append(work, takes=takes)

    def runs(self, *names: str) -> None:
        until(lambda: sorted(self.begun) == sorted(names), f"{names} to begin")


def test_jobs_run_at_the_same_time_as_far_as_there_is_room(queue: WorkQueue) -> None:
    """A wide job that waits is not overtaken by a small one behind it."""
    work = Work(queue)
    jobs = [work.add(name, takes) for name, takes in [("a", 2), ("b", 1), ("wide", 9), ("c", 1)]]
    work.runs("a", "b")
    assert [job.view.ahead for job in jobs[2:]] == [2, 3]
    assert (queue.waiting, bool(queue._running)) == (2, True)
    work.ends["a"].set()
    assert jobs[0].outcome.result(SECONDS) == "a"
    work.runs("a", "b")
    work.ends["b"].set()
    work.runs("a", "b", "wide")
    work.ends["wide"].set()
    work.runs("a", "b", "wide", "c")
    work.ends["c"].set()
    assert [job.outcome.result(SECONDS) for job in jobs] == ["a", "b", "wide", "c"]


def test_a_wide_job_that_is_cancelled_lets_those_behind_it_go(queue: WorkQueue) -> None:
    work = Work(queue)
    work.add("a", 1)
    work.runs("a")
    wide, _ = work.add("wide", 4), work.add("b", 3)
    wide.cancel()
    work.runs("a", "b")
    queue.close()
    assert not bool(queue._running)


@pytest.mark.parametrize("how", ["raises", "no room"])
def test_jobs_go_in_order_where_they_cannot_be_chosen(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The threads of the queue would end, and nothing would run any more."""

    def choose(free: int, waiting: Sequence[Job], running: Sequence[Job]) -> JobStart:
        if how == "raises":
            raise ValueError("of a policy")
        return JobStart(waiting[-1], free + 1)

    found = WorkQueue(max_waiting=8, capacity=1, choose=choose)
    jobs = [found.append(lambda job, number=number: number) for number in range(3)]  # type: ignore[misc]
    assert [job.outcome.result(SECONDS) for job in jobs] == [0, 1, 2]
    assert "jobs go in order" in caplog.text
    found.close()


def test_a_function_for_a_cancelled_job_is_called_once_it_is_known(queue: WorkQueue) -> None:
    called = []
    job = Work(queue).add("a", 1)
    job.when_cancelled(lambda: called.append("early"))
    job.cancel()
    job.when_cancelled(lambda: called.append("late"))
    assert called == ["early", "late"]


@pytest.mark.parametrize(
    ("served", "at_once"),
    [
        (ServedModel(model="fake", devices=FOUR), 1),
        (ServedModel(model="fake", devices=FOUR, per_request=2), 2),
        (ServedModel(model="fake", devices=FOUR, plan=Plan(cfg=2)), 2),
        (ServedModel(model="fake", devices=FOUR, plan=Plan(patch=3)), 1),
        (ServedModel(model="fake", devices=FOUR, per_request=1), 4),
    ],
    ids=str,
)
def test_requests_share_the_devices(served: ServedModel, at_once: int) -> None:
    fake: Any = FakeGenerator(served)
    service = ImageService(fake, ServerSettings())
    service.load()
    client = client_of(application(service))
    fake.gate.clear()
    try:
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(client.post, PATH, json={"prompt": "a"}) for _ in range(6)]
            until(lambda: (len(fake.calls), service.waiting) == (at_once, 6 - at_once), "all to come")
            with pytest.raises(AssertionError, match="one more to run"):
                until(lambda: len(fake.calls) > at_once, "one more to run", seconds=0.1)
            fake.gate.set()
            assert [each.result(SECONDS).status_code for each in asked] == [200] * 6
    finally:
        fake.gate.set()
        service.close()


@pytest.mark.breadth
def test_two_requests_at_once_make_the_images_they_make_alone() -> None:
    """On a device each, and one on both with a plan of its own."""
    generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu", "cpu"), per_request=1))
    service = ImageService(generator, ServerSettings())
    small = {"prompt": "a red house", "size": "96x64", "num_inference_steps": 6}
    bodies = [{**small, "seed": 1}, {**small, "seed": 2}, {**small, "seed": 1, "plan": "cfg=2"}]
    try:
        service.load()
        client = client_of(application(service))
        alone = [client.post(PATH, json=body).json() for body in bodies]
        assert [each["patchpar"]["ranks"] for each in alone] == [1, 1, 2]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda body: client.post(PATH, json=body).json(), bodies))
        assert [each["data"] for each in found] == [each["data"] for each in alone]
    finally:
        service.close()
