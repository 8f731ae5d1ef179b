"""Ranks of a server: each is asked whether it answers, and an administrator takes them out of service."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from patchpar import ParallelPipeline
from patchpar.errors import WorkerHung
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.serving import rank_pings
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.job import Job
from patchpar.serving.rank_pings import SILENT_SECONDS, RankPings
from patchpar.serving.rank_pool import AGAIN_SECONDS, RankPool
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from tests.serving.requests import PATH, client_of, is_busy, until
from tests.serving.test_http import error_of
from tests.serving.test_scheduler import RankedGenerator

KEY = "0123456789abcdef-admin"
RANKS = "/admin/ranks"
LATER = f"{PATH}?async=true"


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pings, "PERIOD_SECONDS", 0.01)


def test_a_rank_that_does_not_answer_is_silent(quick_pings: None) -> None:
    """Only one that has nothing to do; the end of a call is an answer too."""
    clock, gate = Clock(), threading.Event()
    pings = RankPings(lambda rank, _: rank == 1 and gate.wait(20), 3, clock)
    ranks = RankPool(3, pings)
    assert not pings.is_silent(0), "nobody asks yet"
    pings.start(ranks.is_idle, lambda rank: None)
    with ranks.taken(1) as (busy,):
        clock.now = SILENT_SECONDS + 1
        until(lambda: ranks.states == ("busy", "silent", "free"), "the others to answer")
        assert ranks.usable == 2
        clock.now += SILENT_SECONDS + 1
    assert (busy, ranks.states[0]) == (0, "free"), "it has just answered"
    until(lambda: ranks.states == ("free", "silent", "free"), "the third to answer again")
    with ranks.taken(2) as found:
        assert found == (0, 2), "one that is silent comes last"
    gate.set()
    until(lambda: ranks.states == ("free",) * 3, "it to answer")
    pings.close()


def test_a_rank_that_fails_is_lost(quick_pings: None) -> None:
    def fails(rank: int, is_cancelled: Callable[[], bool]) -> None:
        if rank == 1:
            raise WorkerHung("rank 1 stands still", rank=1)

    pings, lost = RankPings(fails, 2), list[int]()
    ranks = RankPool(2, pings)

    def lose(rank: int) -> None:
        ranks.lose((rank,))
        lost.append(rank)

    pings.start(ranks.is_idle, lose)
    until(lambda: lost == [1], "it to be lost")
    assert ranks.states == ("free", "lost")
    pings.close()


def test_a_device_of_this_process_that_fails_is_lost(
    quick_pings: None, pipe: ParallelPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while nothing runs; no call can use it again, so that the server is not ready until it is started anew."""
    generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu",)))
    generator.open = lambda: generator.adopt(pipe)  # type: ignore[method-assign]
    generator.close = lambda: None  # type: ignore[method-assign]
    service = ImageService(generator, ServerSettings())
    service.load()
    assert service.state == "ready"

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as broken:
        broken.setattr(PipelineRunner, "free_memory", fails)
        broken.setattr(PipelineRunner, "generate", fails)
        until(lambda: service.state == "lost", "it to be lost")
        generator.ranks.restore((0,))
        error = error_of(client_of(application(service)).post(PATH, json={"prompt": "a"}), 500)
        assert error["code"] == "failed"
        until(lambda: not is_busy(service), "the attempts to end")
        assert service.state == "lost"
    service.close()


def test_a_rank_that_could_not_be_replaced_is_replaced_again(quick_pings: None) -> None:
    """Else a server that nobody asks, since it is not ready, would never be."""
    clock, lost = Clock(), list[int]()
    pings = RankPings(lambda rank, _: None, 2)
    ranks = RankPool(2, pings, clock=clock)

    def lose(rank: int) -> None:
        ranks.lose((rank,))
        lost.append(rank)

    ranks.lose((1,))
    pings.start(ranks.is_idle, lose, ranks.is_overdue)
    clock.now = AGAIN_SECONDS
    assert not ranks.is_overdue(1)
    with ranks.taken(1, lost_first=True) as found:
        clock.now = AGAIN_SECONDS + 1
        assert (found, ranks.is_overdue(1)) == ((1,), False), "it is being replaced"
    until(lambda: lost == [1], "it to be replaced again")
    clock.now += AGAIN_SECONDS
    assert not ranks.is_overdue(1)
    ranks.restore((1,))
    clock.now += AGAIN_SECONDS
    assert not any(map(ranks.is_overdue, range(2)))
    pings.close()
    assert lost == [1]


@pytest.fixture
def four(quick_pings: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, ImageService]]:
    monkeypatch.setattr(rank_pings, "SILENT_SECONDS", 0.2)
    yield from served(RemovableGenerator())


class Workers:
    """Stands for a pipeline: notes which of its workers were ended and started."""

    can_release = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def release(self, rank: int) -> None:
        self.calls.append(("release", rank))

    def take_back(self, rank: int) -> None:
        self.calls.append(("take_back", rank))


class RemovableGenerator(RankedGenerator):
    """Of four devices, all for each request unless it says otherwise."""

    def __init__(self, **served: Any) -> None:
        super().__init__(ServedModel(model="fake", devices=("cpu",) * 4, **served))
        self.pipe = Workers()
        self.takes: list[int] = []
        self.fails = False

    @property
    def state(self) -> Any:
        needed = min(self.served.devices_of(self.served.plan), self.ranks.in_service)
        return "ready" if self.ranks.usable >= needed else "lost"

    @state.setter
    def state(self, value: Any) -> None: ...

    def warm_up_on(self, job: Job, plan: Any, groups: list[tuple[int, ...]]) -> None:
        if self.fails:
            raise WorkerHung("it does not start", rank=groups[0][0])

    def generate(self, job: Job, call: Any) -> Any:
        self.takes.append(job.takes)
        return super().generate(job, call)


def served(fake: Any, **settings: Any) -> Iterator[tuple[Any, Any, ImageService]]:
    """A client with the key of administrators, its generator and its service."""
    service = ImageService(fake, ServerSettings(admin_keys=ApiKeys.of(KEY), **settings))
    service.load()
    yield client_of(application(service), KEY), fake, service
    fake.gate.set()
    service.close()


def pids_of(generator: ImageGenerator) -> tuple[int, ...]:
    executor: Any = generator.pipe._executor
    return tuple(executor.pids)


def states(client: Any) -> list[str]:
    return [each["state"] for each in client.get(RANKS).json()["data"]]


def test_ready_says_whether_ranks_answer(four: Any) -> None:
    client, fake, _ = four
    fake.silent.add(2)
    until(lambda: client.get("/health/ready").json() == {"status": "lost"}, "it to be noticed")
    assert states(client) == ["free", "free", "silent", "free"]
    assert 'patchpar_ranks{state="silent"} 1.0' in client.get("/metrics").text
    fake.silent.clear()
    until(lambda: client.get("/health/ready").status_code == 200, "it to answer")


def test_a_rank_is_removed_and_put_back(four: Any) -> None:
    """Requests, also those that wait already, have the devices that are left."""
    client, fake, service = four
    fake.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.post, PATH, json={"prompt": "runs"})
        assert fake.started.wait(20)
        waiting = client.post(LATER, json={"prompt": "waits"}).json()["id"]
        removed = pool.submit(client.delete, f"{RANKS}/1")
        until(lambda: service.waiting == 2, "it to wait")
        fake.gate.set()
        states = [each["state"] for each in removed.result(20).json()["data"]]
        assert [state == "removed" for state in states] == [False, True, False, False], "the others may be busy again"
        assert running.result(20).status_code == 200
    until(lambda: client.get(f"/v1/jobs/{waiting}").json()["status"] == "completed", "the job")
    assert client.get("/health/ready").status_code == 200
    assert client.post(PATH, json={"prompt": "a", "degree": 4}).json()["error"]["param"] == "degree"
    back = client.post(RANKS, json={"rank": 1})
    assert [each["state"] for each in back.json()["data"]] == ["free"] * 4
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200
    assert fake.takes == [4, 3, 4]
    assert fake.pipe.calls == [("release", 1), ("take_back", 1)]


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_has_failed_is_replaced_with_those_it_was_started_with(quick_pings: None, alone: bool) -> None:
    fake, repaired, fails = RemovableGenerator(), list[int](), [1]
    fake.pipe.can_release = alone
    repair = fake.repair

    def ping(rank: int, is_cancelled: Any) -> None:
        if rank in fails:
            fails.remove(rank)
            raise WorkerHung("rank 1 stands still", rank=rank)

    def noted(job: Job) -> None:
        repaired.append(len(fake.ranks.lost))
        repair(job)

    fake.pings._ping, fake.repair = ping, noted  # type: ignore[method-assign]
    for _ in served(fake):
        until(lambda: repaired != [], "it to be replaced")
        until(lambda: fake.ranks.states == ("free",) * 4, "it to be there")
        assert repaired == [1 if alone else 4]


def test_a_rank_that_does_not_start_stays_out(four: Any) -> None:
    client, fake, _ = four
    client.delete(f"{RANKS}/3")
    fake.fails = True
    assert error_of(client.post(RANKS, json={"rank": 3}), 500)["code"] == "worker_lost"
    assert states(client)[3] == "removed"
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("changes", "rank", "status", "reason"),
    [
        ({}, "9", 404, "no rank 9"),
        ({}, "x", 404, "no rank"),
        ({"plan": Plan(patch=4)}, "0", 409, "the server's plan, patch=4"),
        ({"can_release": False}, "0", 409, "are started together"),
        ({"page_paths": ("/app",)}, "0", 409, "the page"),
    ],
)
def test_ranks_that_cannot_be_removed(changes: dict[str, Any], rank: str, status: int, reason: str) -> None:
    fake = RemovableGenerator(**{name: value for name, value in changes.items() if name == "plan"})
    fake.pipe.can_release = changes.get("can_release", True)
    for client, _, _ in served(fake, page_paths=changes.get("page_paths", ())):
        assert reason in error_of(client.delete(f"{RANKS}/{rank}"), status)["message"]
        assert states(client) == ["free"] * 4


def test_the_last_rank_and_bad_bodies(four: Any) -> None:
    client, _, service = four
    for rank in (0, 1, 2):
        assert client.delete(f"{RANKS}/{rank}").status_code == 200
    assert "last one" in error_of(client.delete(f"{RANKS}/3"), 409)["message"]
    assert error_of(client.delete(f"{RANKS}/0"), 404)["code"] == "not_found"
    assert error_of(client.post(RANKS, json={"rank": 3}), 404)["code"] == "not_found"
    for body in ({}, {"rank": -1}, {"rank": "1"}, {"device": "cuda:4"}):
        assert error_of(client.post(RANKS, json=body), 400)["param"] in ("rank", "device")
    unknown = error_of(client.post(RANKS, json={"rnk": 1}), 400)
    assert (unknown["code"], "did you mean 'rank'" in unknown["message"]) == ("unknown_parameter", True)
    plan = client.post(PATH, json={"prompt": "a", "plan": "patch=2"})
    assert error_of(plan, 400)["param"] == "plan"
    assert not is_busy(service)


@pytest.mark.breadth  # workers of its own; the parts of it are daily above and in tests/pipeline
def test_real_workers_are_ended_asked_and_replaced(pipe: ParallelPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = ImageGenerator(ServedModel(model="embedded", devices=("cpu", "cpu"), options={"deadline": 5.0}))
    service = ImageService(generator, ServerSettings(admin_keys=ApiKeys.of(KEY)))
    try:
        service.load()
        client = client_of(application(service), KEY)
        body = {"prompt": "a red house", "size": "128x128", "num_inference_steps": 3, "seed": 4}
        want = client.post(PATH, json={**body, "degree": 1}).json()["data"]
        before = pids_of(generator)
        os.kill(before[1], signal.SIGKILL)
        until(lambda: generator.ranks.states == ("free", "free"), "nothing to be wrong")
        until(lambda: pids_of(generator) not in (before, before[:1]), "the worker to be replaced by a ping")
        assert client.post(PATH, json=body).json()["patchpar"]["ranks"] == 2  # it has loaded the model
        os.kill(pids_of(generator)[1], signal.SIGSTOP)
        until(lambda: client.get("/health/ready").status_code == 503, "its silence to be noticed")
        until(lambda: client.get("/health/ready").status_code == 200, "it to be replaced")
        assert client.delete(f"{RANKS}/0").status_code == 200
        made = client.post(PATH, json=body).json()
        assert (made["data"], made["patchpar"]["ranks"]) == (want, 1)
        assert client.post(RANKS, json={"rank": 0}).status_code == 200
        assert client.post(PATH, json=body).json()["patchpar"]["ranks"] == 2
    finally:
        service.close()
