"""Costs that are learnt, policies on a real queue, deadlines, and ranks that are lost while others go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchpar.errors import WorkerDied
from patchpar.serving import scheduler as scheduling
from patchpar.serving.http.application import application
from patchpar.serving.image_call import ImageCall
from patchpar.serving.image_request import parse_request
from patchpar.serving.job import Job
from patchpar.serving.job_facts import facts_of
from patchpar.serving.job_queue import WorkQueue
from patchpar.serving.rank_pings import RankPings
from patchpar.serving.rank_pool import RankPool
from patchpar.serving.scheduler import JobFacts, JobScheduler
from patchpar.serving.scheduling import learnt_costs
from patchpar.serving.scheduling.learnt_costs import CallShape, LearntCosts
from patchpar.serving.scheduling.policies import POLICIES
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from patchpar.shard.verification_cache import VerificationCache
from tests.serving.fakes import MODEL, FakeGenerator
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_http import error_of

SMALL, LARGE = CallShape(512 * 512), CallShape(1024 * 1024)


def test_costs_are_learnt_and_kept(tmp_path: Path) -> None:
    cache, facts = VerificationCache(tmp_path), {"model": "a"}
    costs = LearntCosts(cache, facts)
    for seconds in (10.0, 12.0):
        costs.observe(SMALL, 1, 10, seconds)
    again = LearntCosts(cache, facts)
    assert again.costs(SMALL, (1,)).steps[1] == pytest.approx(1.1)
    assert LearntCosts(cache, {"model": "b"}).costs(SMALL, (1,)).steps[1] == 1.0
    assert LearntCosts().costs(SMALL, (1,)).steps[1] == 1.0
    for _ in range(40):
        again.observe(SMALL, 1, 10, 2.0)
    assert again.costs(SMALL, (1,)).steps[1] == pytest.approx(0.2, rel=0.02), "older calls fade"


def test_a_broken_file_of_costs_is_ignored(tmp_path: Path) -> None:
    cache, facts = VerificationCache(tmp_path), {"model": "a"}
    for rows in ("[[1]]", "[[0, 1, 1, 1.0, 1]]", "[[1, 1, 1, -1, 1]]", '"a"', "3"):
        (tmp_path / f"{cache.key(facts)}.json").write_text(f'{{"step_seconds": {rows}}}')
        assert LearntCosts(cache, facts).costs(SMALL, (1,)).steps[1] == 1.0


def test_a_file_of_costs_without_plans_is_read(tmp_path: Path) -> None:
    cache, facts = VerificationCache(tmp_path), {"model": "a"}
    (tmp_path / f"{cache.key(facts)}.json").write_text('{"step_seconds": [[262144, 1, 1, 2.5, 3]]}')
    assert LearntCosts(cache, facts).costs(SMALL, (1,)).steps[1] == 2.5


def test_what_was_not_measured_is_guessed_from_what_is_near() -> None:
    costs = LearntCosts()
    costs.observe(SMALL, 1, 1, 1.0)
    steps = costs.costs(LARGE, (1, 2, 4)).steps
    assert steps[1] == pytest.approx(4.0)
    assert 1 < steps[1] / steps[2] < 2
    costs.observe(LARGE, 4, 1, 9.0)
    assert not costs.is_measured(LARGE, 1)
    assert costs.costs(LARGE, (1, 4)).steps[1] > 9, "the same size is nearer than the same number of devices"
    assert costs.costs(LARGE, (1, 4)).degrees == (1, 4)
    costs.observe(LARGE, 1, 1, 4.0)
    assert costs.costs(LARGE, (1, 4)).degrees == (1,), "four devices are slower than one: no longer used"


def test_costs_are_those_of_a_plan(tmp_path: Path) -> None:
    """A plan with stale values is faster than an exact one; what is not known of it is guessed from others."""
    cache, facts = VerificationCache(tmp_path), {"model": "a"}
    costs, plan = LearntCosts(cache, facts), "patch=2 fresh-edges"
    stale, large = replace(SMALL, plan=plan), replace(LARGE, plan=plan)
    costs.observe(SMALL, 2, 1, 4.0)
    assert costs.costs(stale, (2,)).steps[2] == pytest.approx(4.0), "a guess"
    assert not costs.is_measured(stale, 2)
    costs.observe(stale, 2, 1, 3.0)
    again = LearntCosts(cache, facts)
    assert [again.costs(shape, (2,)).steps[2] for shape in (SMALL, stale)] == [4.0, 3.0]
    assert again.costs(large, (2,)).steps[2] == pytest.approx(12.0), "from the same plan"


def test_so_many_costs_are_known_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose sizes and plans."""
    monkeypatch.setattr(learnt_costs, "MOST", 3)
    costs = LearntCosts()
    for pixels in (1, 2, 3, 1, 4):
        costs.observe(CallShape(pixels), 1, 1, 1.0)
    assert [costs.is_measured(CallShape(pixels), 1) for pixels in (1, 2, 3, 4)] == [True, False, True, True]


@pytest.mark.parametrize(("policy", "seconds"), [("latency", 5 * 0.5 * 4), ("throughput", 2 * 1.0 * 4)])
def test_the_end_of_the_queue_is_predicted(policy: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests of four steps on four devices: each on all of them in turn, or four beside one another and one."""
    monkeypatch.setattr(scheduling, "PREDICTION_SECONDS", 60.0)
    costs = LearntCosts()
    for degree, each in ((1, 1.0), (4, 0.5)):
        costs.observe(LARGE, degree, 1, each)
    scheduler = JobScheduler(POLICIES[policy], 4, costs)
    facts = JobFacts(shape=LARGE, steps=4, degrees=(1, 4))
    jobs = [Job(lambda job: None, 4, facts=facts) for _ in range(5)]
    admin = Job(lambda job: None, 4)
    assert scheduler.seconds_left([admin, *jobs], []) == pytest.approx(seconds, abs=0.5)
    assert scheduler.seconds_left([], []) == pytest.approx(seconds, abs=1.5), "of a moment ago"
    assert JobScheduler(POLICIES[policy], 4, costs).seconds_left([], []) == pytest.approx(0, abs=0.5)
    running = JobScheduler(POLICIES[policy], 4, costs).seconds_left([], jobs[:1])
    assert running == pytest.approx(2.0, abs=0.5)


def test_a_full_queue_says_when_it_will_have_ended() -> None:
    fake: Any = FakeGenerator()
    service = ImageService(fake, ServerSettings(max_queue=3))
    service.load()
    client = client_of(application(service))
    body = {"prompt": "a", "size": "64x64", "num_inference_steps": 10}
    service.scheduler.costs.observe(CallShape(64 * 64, branches=2), 1, 1, 3.0)
    fake.gate.clear()
    for _ in range(4):
        assert client.post(f"{PATH}?async=true", json=body).status_code == 202
        assert fake.started.wait(20)
    response = client.post(PATH, json=body)
    assert response.status_code == 503
    assert 110 <= int(response.headers["retry-after"]) <= 120, "four of ten steps of 3 s each"
    fake.gate.set()
    service.close()


def test_steps_of_an_image_that_begins_with_another_one() -> None:
    model = replace(MODEL, parameters={**MODEL.parameters, "strength": 0.5})
    served = ServedModel(model="fake", devices=("cpu",))
    request = parse_request(b'{"prompt": "a"}')
    for strength, steps in ((None, 10), (0.3, 6), (0.01, 1)):
        given = {} if strength is None else {"strength": strength}
        call = ImageCall(arguments={"num_inference_steps": 20, **given}, seed=0, count=1, size=(64, 64))
        assert facts_of(request, call, served, model, "latency").steps == steps
        assert facts_of(request, call, served, MODEL, "latency").steps == (20 if strength is None else steps)


def queue_of(policy: str, costs: LearntCosts) -> WorkQueue:
    return WorkQueue(max_waiting=8, capacity=4, choose=JobScheduler(POLICIES[policy], 4, costs).choose)


def test_a_queue_gives_each_job_what_its_policy_says() -> None:
    costs = LearntCosts()
    for degree, seconds in ((1, 1.0), (2, 0.6), (4, 0.4)):
        costs.observe(LARGE, degree, 1, seconds)
    queue, gate = queue_of("throughput", costs), threading.Event()
    facts = JobFacts(shape=LARGE, steps=4, degrees=(1, 2, 4))
    first = queue.append(lambda job: gate.wait(20), takes=4)  # without facts: in order
    together = threading.Barrier(4)
    jobs = [queue.append(lambda job: together.wait(20), takes=4, facts=facts) for _ in range(4)]
    gate.set()
    for job in (first, *jobs):
        job.outcome.result(20)
    assert first.takes == 4
    assert [job.takes for job in jobs] == [1, 1, 1, 1]
    alone = queue.append(lambda job: None, takes=4, facts=facts)
    alone.outcome.result(20)
    assert alone.takes == 4
    queue.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_higher_priority_comes_first(policy: str) -> None:
    queue, gate, order = queue_of(policy, LearntCosts()), threading.Event(), list[str]()
    queue.append(lambda job: gate.wait(20), takes=4, facts=JobFacts(shape=LARGE, steps=1, degrees=(4,)))

    def work(name: str) -> Any:
        return lambda job: order.append(name)

    jobs = [
        queue.append(work(name), facts=JobFacts(shape=LARGE, steps=1, degrees=(4,), priority=priority))
        for name, priority in (("low", -1), ("middle", 0), ("high", 1))
    ]
    gate.set()
    for job in jobs:
        job.outcome.result(20)
    assert order == ["high", "middle", "low"]
    queue.close()


def test_a_deadline_that_cannot_be_met_is_refused_at_once(client: Any, service: ImageService) -> None:
    body = {"prompt": "a", "size": "64x64", "num_inference_steps": 10, "deadline_ms": 500}
    assert client.post(PATH, json=body).status_code == 200, "nothing is known yet"
    shape = CallShape(64 * 64, branches=2)
    for _ in range(20):
        service.scheduler.costs.observe(shape, 1, 10, 10.0)
    error = error_of(client.post(PATH, json=body), 504)
    assert (error["code"], error["param"]) == ("deadline_unreachable", "deadline_ms")
    assert client.post(PATH, json={**body, "deadline_ms": 60_000}).status_code == 200


def test_a_deadline_that_passes_in_the_queue(client: Any, fake: FakeGenerator) -> None:
    fake.gate.clear()
    running = client.post(f"{PATH}?async=true", json={"prompt": "a"}).json()["id"]
    assert fake.started.wait(20)
    late = client.post(f"{PATH}?async=true", json={"prompt": "b", "deadline_ms": 1}).json()["id"]
    fake.gate.set()
    until(lambda: client.get(f"/v1/jobs/{late}").json()["status"] == "failed", "the late one to fail")
    assert client.get(f"/v1/jobs/{late}").json()["error"]["code"] == "deadline_missed"
    until(lambda: client.get(f"/v1/jobs/{running}").json()["status"] == "completed", "the other one")
    assert len(fake.calls) == 1, "nothing is generated for the late one"
    assert "patchpar_deadlines_missed_total 1.0" in client.get("/metrics").text


def test_ranks_that_are_lost_or_slow_are_taken_last() -> None:
    ranks, slow = RankPool(4, RankPings(lambda rank, _: None, 4), lambda: slow), {0: 1.5}
    assert (ranks.slowness(0), ranks.slowness(1)) == (1.5, 1.0)
    with ranks.taken(3) as taken:
        assert taken == (1, 2, 3)
    slow.clear()
    with ranks.taken(2) as found:
        assert found == (0, 1)
        assert ranks.states == ("busy", "busy", "free", "free")
        ranks.lose(found)
    assert ranks.states == ("lost", "lost", "free", "free")
    with ranks.taken(2) as found:
        assert found == (2, 3)
    with ranks.taken(1, lost_first=True) as found:
        assert found == (0,)
        ranks.restore(found)
    assert (ranks.usable, ranks.lost) == (3, (1,))


@pytest.fixture
def four() -> Iterator[tuple[Any, FakeGenerator, ImageService]]:
    """A server of four devices, one for each request, whose state is that of its ranks."""
    fake: Any = RankedGenerator(ServedModel(model="fake", devices=("cpu",) * 4, per_request=1))
    service = ImageService(fake, ServerSettings())
    service.load()
    yield client_of(application(service)), fake, service
    fake.gate.set()
    fake.may_warm.set()
    service.close()


class RankedGenerator(FakeGenerator):
    """Its calls take ranks, and lose them with an error."""

    @property
    def state(self) -> Any:
        return "ready" if self.ranks.usable >= self.served.devices_of("auto") else "lost"

    @state.setter
    def state(self, value: Any) -> None: ...

    def generate(self, job: Job, call: Any) -> Any:
        with self.ranks.taken(job.takes) as ranks:
            try:
                return super().generate(job, call)
            except WorkerDied:
                self.ranks.lose(ranks)
                raise

    def repair(self, job: Job) -> None:
        with self.ranks.taken(job.takes, lost_first=True) as ranks:
            self.warm_up(job)
            self.ranks.restore(ranks)


def test_a_server_is_ready_while_one_rank_of_several_is_replaced(four: Any) -> None:
    client, fake, _ = four
    fake.error = WorkerDied("rank 0 ended", rank=0)
    fake.may_warm.clear()
    assert error_of(client.post(PATH, json={"prompt": "a"}), 500)["code"] == "worker_lost"
    assert 'patchpar_recoveries_total{outcome="failed"} 1.0' in client.get("/metrics").text
    assert client.get("/health/ready").status_code == 200
    assert fake.ranks.states[0] == "lost"
    assert client.post(PATH, json={"prompt": "b"}).status_code == 200, "others serve meanwhile"
    fake.may_warm.set()
    until(lambda: fake.ranks.states == ("free",) * 4, "the rank to be replaced")


def test_a_server_that_has_too_few_ranks_is_not_ready(four: Any) -> None:
    client, fake, _ = four
    fake.ranks.lose((0, 1, 2, 3))
    response = client.get("/health/ready")
    assert (response.status_code, response.json()) == (503, {"status": "lost"})
    fake.ranks.restore((2,))
    assert client.get("/health/ready").status_code == 200


def test_what_a_policy_knows_of_a_request(four: Any) -> None:
    client, _, service = four
    assert client.post(PATH, json={"prompt": "a", "size": "64x64"}).status_code == 200
    queued = service.submit(parse_request(b'{"prompt": "a", "size": "64x64", "n": 2, "num_inference_steps": 7}'))
    facts = queued.facts
    assert (facts.shape, facts.steps, facts.degrees) == (CallShape(64 * 64, branches=2), 14, (1,))
