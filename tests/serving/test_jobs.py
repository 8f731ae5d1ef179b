"""Jobs whose results are fetched later: their states, events, cancelling, and that nobody sees those of others."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.http.application import application
from patchpar.serving.image_call import ImageCall
from patchpar.serving.job import Job
from patchpar.serving.kept_jobs import KeptJobs, KeptWork
from patchpar.serving.service import ImageService
from patchpar.serving.settings import KeptResults, ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_events import events_in

LATER = f"{PATH}?async=true"
BODY = {"prompt": "a fox", "seed": 3}
KEYS = "0123456789abcdef-one", "0123456789abcdef-two"


@pytest.fixture
def closed_gate(fake: FakeGenerator) -> Iterator[FakeGenerator]:
    fake.gate.clear()
    yield fake
    fake.gate.set()


def finished(client: Any, name: str) -> dict[str, Any]:
    until(lambda: client.get(f"/v1/jobs/{name}").json()["status"] not in ("queued", "in_progress"), "the job")
    return dict(client.get(f"/v1/jobs/{name}").json())


def test_a_result_is_that_of_a_request_that_waits(client: Any) -> None:
    response = client.post(LATER, json=BODY)
    assert response.status_code == 202
    assert response.json()["object"] == "job"
    job = finished(client, response.json()["id"])
    now = client.post(PATH, json=BODY).json()
    assert job["status"] == "completed"
    assert job["progress"] == 100
    assert job["result"]["data"] == now["data"]
    assert job["expires_at"] == job["completed_at"] + 3600
    (listed,) = client.get("/v1/jobs").json()["data"]
    assert listed["result"] is None, "a list has no images"


@pytest.mark.parametrize(("value", "status"), [("1", 202), ("True", 202), ("0", 200), ("false", 200), ("", 200)])
def test_a_job_is_asked_for_by_a_truth_value(client: Any, value: str, status: int) -> None:
    assert client.post(f"{PATH}?async={value}", json=BODY).status_code == status


@pytest.mark.parametrize("value", ["yes", "on", "tru", "2"])
def test_any_other_value_is_refused(client: Any, value: str) -> None:
    """Who writes it would wait for the images instead of getting a job."""
    response = client.post(f"{PATH}?async={value}", json=BODY)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "async")
    assert error["message"] == f"async={value!r}: true returns a job at once, false (the default) waits for the images"


def test_states_and_events(client: Any, closed_gate: FakeGenerator, service: ImageService) -> None:
    first, second = (client.post(LATER, json=BODY).json()["id"] for _ in range(2))
    assert closed_gate.started.wait(20)
    until(lambda: client.get(f"/v1/jobs/{first}").json()["status"] == "in_progress", "the first to run")
    assert (
        client.get(f"/v1/jobs/{second}").json() | {"status": "queued", "ahead": 1}
        == client.get(f"/v1/jobs/{second}").json()
    )
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(lambda: client.get(f"/v1/jobs/{first}/events").text)
        until(lambda: bool(service.kept._jobs[first].job._listeners), "somebody who reads its events")
        closed_gate.gate.set()
        events = events_in(read.result(20))
    assert [name for name, _ in events][-1] == "job.completed"
    assert events[0][0] == "job.progress"
    assert events_in(client.get(f"/v1/jobs/{first}/events").text)[0][0] == "job.completed", "also long after"


def test_cancel_and_delete(client: Any, closed_gate: FakeGenerator) -> None:
    running, waiting = (client.post(LATER, json=BODY).json()["id"] for _ in range(2))
    assert closed_gate.started.wait(20)
    for name in (waiting, running):
        assert client.post(f"/v1/jobs/{name}/cancel").status_code == 202
        job = finished(client, name)
        assert (job["status"], job["error"]["code"], job["result"]) == ("cancelled", "cancelled", None)
    assert client.delete(f"/v1/jobs/{running}").json() == {"id": running, "object": "job.deleted", "deleted": True}
    assert client.get(f"/v1/jobs/{running}").status_code == 404
    closed_gate.gate.set()
    assert client.post(PATH, json=BODY).status_code == 200, "nothing is lost for others"


def test_a_failed_job_has_an_error(client: Any, fake: FakeGenerator) -> None:
    fake.error = ValueError("/secret")
    job = finished(client, client.post(LATER, json=BODY).json()["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "failed")
    assert "secret" not in job["error"]["message"]


def test_the_same_request_twice_is_one_job(client: Any, fake: FakeGenerator) -> None:
    headers = {"Idempotency-Key": "mine"}
    first, again = (client.post(LATER, json=BODY, headers=headers).json()["id"] for _ in range(2))
    assert first == again
    finished(client, first)
    assert len(fake.calls) == 1
    other = client.post(LATER, json={**BODY, "seed": 4}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=a", "limit"),
        ("limit=0000000019999", "limit"),
        (f"limit=000000001{'9' * 5000}", "limit"),  # more digits than Python reads
        ("order=up", "order"),
        ("after=job_1", "after"),
    ],
    ids=lambda text: text[:24],
)
def test_bad_lists(client: Any, query: str, param: str) -> None:
    response = client.get(f"/v1/jobs?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_pages_of_jobs(client: Any) -> None:
    names = [client.post(LATER, json=BODY).json()["id"] for _ in range(3) if not time.sleep(0.05)]
    page = client.get("/v1/jobs?limit=2").json()
    assert [each["id"] for each in page["data"]] == names[:0:-1]
    assert page["has_more"]
    rest = client.get(f"/v1/jobs?limit=2&after={page['last_id']}").json()
    assert [each["id"] for each in rest["data"]] == names[:1]
    assert [each["id"] for each in client.get("/v1/jobs?order=asc").json()["data"]] == names


def test_stream_and_later_are_not_both(client: Any) -> None:
    assert client.post(LATER, json={**BODY, "stream": True}).json()["error"]["param"] == "stream"


def test_jobs_belong_to_keys(fake: Any) -> None:
    service = ImageService(fake, ServerSettings(keys=ApiKeys.of(*KEYS)))
    service.load()
    app = application(service)
    mine, other = (client_of(app, key) for key in KEYS)
    name, others = (
        client.post(LATER, json=BODY, headers={"Idempotency-Key": "one"}).json()["id"] for client in (mine, other)
    )
    assert name != others, "a request that another key has sent is another one"
    assert other.delete(f"/v1/jobs/{others}").status_code == 200
    assert mine.get(f"/v1/jobs/{name}").status_code == 200
    for method, path in (("get", ""), ("get", "/events"), ("post", "/cancel"), ("delete", "")):
        assert getattr(other, method)(f"/v1/jobs/{name}{path}").status_code == 404
    assert other.get("/v1/jobs").json()["data"] == []
    assert mine.get(f"/v1/videos/{name}").status_code == 404, "it is no video"
    service.close()


def test_results_expire_and_the_oldest_go_first(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = ImageService(fake, ServerSettings(kept=KeptResults(count=2, seconds=60)))
    service.load()
    client = client_of(application(service))
    names = []
    for _ in range(3):
        names.append(client.post(LATER, json=BODY).json()["id"])
        finished(client, names[-1])
    assert [client.get(f"/v1/jobs/{name}").status_code for name in names] == [404, 200, 200]
    now = time.time()
    monkeypatch.setattr("patchpar.serving.kept_jobs.time.time", lambda: now + 61)
    assert client.get(f"/v1/jobs/{names[-1]}").status_code == 404
    service.close()


def test_who_has_many_results_takes_no_room_from_others(fake: Any) -> None:
    service = ImageService(fake, ServerSettings(keys=ApiKeys.of(*KEYS), kept=KeptResults(count=3)))
    service.load()
    app = application(service)
    one, many = (client_of(app, key) for key in KEYS)
    names = []
    for client in (one, many, many, many):
        names.append(client.post(LATER, json=BODY).json()["id"])
        finished(client, names[-1])
    assert one.get(f"/v1/jobs/{names[0]}").status_code == 200, "though it is the oldest"
    assert [many.get(f"/v1/jobs/{name}").status_code for name in names[1:]] == [404, 200, 200]
    service.close()


def test_of_a_finished_job_only_its_result_stays_in_memory(
    client: Any, service: ImageService, closed_gate: FakeGenerator
) -> None:
    """Not the images or frames that it was made of: as many results are kept as --max-kept says."""
    name = client.post(LATER, json=BODY).json()["id"]
    job = weakref.ref(service.kept.get(name, "job", "").job)
    closed_gate.gate.set()
    assert finished(client, name)["result"]["patchpar"]["seed"] == 3
    until(lambda: gc.collect() >= 0 and job() is None, "the job to be freed")


def test_administrators_need_a_key_of_their_own(fake: Any, client: Any) -> None:
    without = ImageService(fake, ServerSettings(keys=ApiKeys.of(KEYS[0])))
    for each in (client, client_of(application(without), KEYS[0])):
        refused = each.get("/admin/ranks")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_admin_key")
    without.close()
    service = ImageService(fake, ServerSettings(keys=ApiKeys.of(KEYS[0]), admin_keys=ApiKeys.of(KEYS[1])))
    service.load()
    app = application(service)
    assert client_of(app, KEYS[0]).get("/admin/ranks").status_code == 401
    assert client_of(app, KEYS[1]).get("/v1/models").status_code == 401
    admin = client_of(app, KEYS[1])
    assert admin.get("/admin/ranks").json()["data"] == [{"rank": 0, "device": "cpu", "state": "free"}]
    assert admin.post("/admin/drain").json() == {"status": "draining", "waiting": 0}
    refused = client_of(app, KEYS[0]).post(PATH, json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    service.close()


def job_of(result: Any) -> Job:
    """A job of a request that is made of nothing."""
    return Job(lambda _: result, source=SimpleNamespace(call=ImageCall(arguments={}, seed=0, count=1, size=(8, 8))))


@pytest.mark.parametrize(
    ("sizes", "left"),
    [
        ([("one", 9)], ["one 0"]),
        ([("one", 3), ("many", 3), ("many", 3), ("many", 3)], ["one 0", "many 2", "many 3"]),
        ([("one", 2), ("one", 2), ("large", 8)], ["one 0", "one 1"]),
    ],
)
def test_results_take_no_more_bytes_than_are_kept(sizes: list[tuple[str, int]], left: list[str]) -> None:
    """Who takes most loses the oldest ones first, as soon as there are too many. One alone is kept."""
    kept = KeptJobs(KeptResults(gigabytes=9e-9 if len(sizes) > 1 else 1e-9))
    dropped = list[int]()
    found = []
    for owner, size in sizes:
        work = KeptWork(
            route="generation",
            owner=owner,
            request=None,
            finish=lambda _, made: made,
            size=lambda made: made,
            drop=lambda _, made: dropped.append(made),
        )
        found.append(kept.add(work, partial(job_of, size)))
        found[-1].job.run()
        found[-1].ended.result(20)
    stays = {each.id for each in kept.close()}
    assert [f"{each.work.owner} {number}" for number, each in enumerate(found) if each.id in stays] == left
    assert len(dropped) == len(sizes) - len(left)


def test_images_in_memory_and_files_of_videos_are_counted(fake: Any) -> None:
    service = ImageService(fake, ServerSettings(kept=KeptResults(gigabytes=1e-9)))
    service.load()
    client = client_of(application(service))
    names = []
    for _ in range(2):
        names.append(client.post(LATER, json=BODY).json()["id"])
        finished(client, names[-1])
    assert [client.get(f"/v1/jobs/{name}").status_code for name in names] == [404, 200]
    service.close()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_result_that_is_awaited_is_there_whatever_the_limit(is_awaited: bool) -> None:
    """As of a video whose client waits for the file while another one ends. Otherwise only the last one is kept."""
    kept = KeptJobs(KeptResults(count=1))
    work = KeptWork(route="video", owner="", request=None, finish=lambda _, made: made, is_awaited=is_awaited)
    found = [kept.add(work, partial(job_of, "the file")) for _ in range(2)]
    for each in found:
        each.job.run()
        each.ended.result(20)
    assert len(kept.all_of("video", "")) == (2 if is_awaited else 1)
    assert [each.result for each in found] == ["the file" if is_awaited else None, "the file"]
    for each in found:
        kept.delete(each)
    assert kept.close() == []


def test_long_keys_are_refused(client: Any) -> None:
    """Two that begin alike would be taken for one."""
    sent = [client.post(LATER, json=BODY, headers={"Idempotency-Key": "k" * 256 + end}) for end in ("", "a")]
    assert [each.status_code for each in sent] == [202, 400]
    assert "at most 256" in sent[1].json()["error"]["message"]
