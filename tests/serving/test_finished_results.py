"""Results that nobody has fetched at the end of a server are there in the next one; what it refuses stays."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchpar import PlanError
from patchpar.pipeline.report import Run
from patchpar.plan.plan import Plan
from patchpar.serving import kept_jobs
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.generated import GeneratedVideo
from patchpar.serving.http.application import application
from patchpar.serving.kept_requests import take_up
from patchpar.serving.partial_images import ImageFigures
from patchpar.serving.request_journal import RequestJournal
from patchpar.serving.service import ImageService
from patchpar.serving.settings import KeptResults, RequestLimits, ServerSettings
from patchpar.serving.video_files import VideoFiles
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_http import KEY, error_of

BODY = {"prompt": "a fox", "size": "64x64", "seed": 3, "num_inference_steps": 40}
OTHER = "another-key-of-someone"


class Servers:
    """Servers of one folder, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services: list[ImageService] = []

    def next(self, fake: Any = None, **settings: Any) -> tuple[ImageService, Any, Any]:
        """End the last server, and start another one: it, and clients of two keys."""
        for each in self.services:
            each.close()
        keys = ApiKeys.of(KEY, OTHER)
        service = ImageService(fake or FakeGenerator(), ServerSettings(journal=self.folder, keys=keys, **settings))
        self.services.append(service)
        service.load()
        app = application(service)
        return service, client_of(app, KEY), client_of(app, OTHER)


@pytest.fixture
def servers(tmp_path: Path) -> Any:
    found = Servers(tmp_path)
    yield found
    for each in found.services:
        each.close()


def ended(client: Any, name: str) -> Callable[[], bool]:
    return lambda: client.get(f"/v1/jobs/{name}").json()["status"] == "completed"


def test_a_result_that_nobody_has_fetched_is_there_in_the_next_server(servers: Servers) -> None:
    _, client, _ = servers.next()
    created = client.post(f"{PATH}?async=true", json=BODY, headers={"Idempotency-Key": "mine"}).json()["id"]
    until(ended(client, created), "its end")
    want = client.get(f"/v1/jobs/{created}").json()
    assert want["result"]["data"][0]["b64_json"]
    for _ in range(2):  # also in the one after that
        fake: Any = FakeGenerator()
        service, client, other = servers.next(fake)
        assert take_up(service) == 0
        assert client.get(f"/v1/jobs/{created}").json() == want
        assert [each["id"] for each in client.get("/v1/jobs").json()["data"]] == [created]
        assert error_of(other.get(f"/v1/jobs/{created}"), 404)["code"] == "not_found"
        again = client.post(f"{PATH}?async=true", json=BODY, headers={"Idempotency-Key": "mine"})
        assert (again.json()["id"], fake.calls) == (created, [])
    assert client.delete(f"/v1/jobs/{created}").json()["deleted"]
    assert list(servers.folder.iterdir()) == []


def test_while_the_journal_is_not_read_nothing_of_it_is_unknown(servers: Servers) -> None:
    """Who polls an ID, or sends a request again with its key, is told to wait: a 404 would be taken for the end."""
    _, client, _ = servers.next()
    key = {"Idempotency-Key": "mine"}
    created = client.post(f"{PATH}?async=true", json=BODY, headers=key).json()["id"]
    until(ended(client, created), "its end")
    service, client, _ = servers.next()  # its model is loaded
    for answer in (
        client.get(f"/v1/jobs/{created}"),
        client.get("/v1/jobs"),
        client.post(f"{PATH}?async=true", json=BODY, headers=key),
    ):
        assert error_of(answer, 503)["code"] == "loading"
        assert answer.headers["Retry-After"]
    assert client.get("/health/ready").json() == {"status": "loading"}
    take_up(service)
    assert client.get("/health/ready").json() == {"status": "ready"}
    assert client.post(f"{PATH}?async=true", json=BODY, headers=key).json()["id"] == created


def test_results_expire_in_the_next_server(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client, _ = servers.next()
    created = client.post(f"{PATH}?async=true", json=BODY).json()["id"]
    until(ended(client, created), "its end")
    service, client, _ = servers.next(kept=KeptResults(seconds=60))
    take_up(service)
    now = kept_jobs.time.time()
    monkeypatch.setattr(kept_jobs.time, "time", lambda: now + 62)
    assert error_of(client.get(f"/v1/jobs/{created}"), 404)["code"] == "not_found"
    assert list(servers.folder.iterdir()) == []


def test_what_the_next_server_refuses_stays(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    """It keeps neither the server from starting, nor the other requests from being taken up."""
    fake: Any = FakeGenerator()
    _, client, _ = servers.next(fake)
    fake.gate.clear()
    running = client.post(f"{PATH}?async=true", json={**BODY, "num_inference_steps": 2}).json()["id"]
    waiting = client.post(f"{PATH}?async=true", json=BODY).json()["id"]
    assert fake.started.wait(20)
    service, client, _ = servers.next(limits=RequestLimits(steps=10))
    fake.gate.set()
    assert take_up(service) == 1
    assert f"{waiting} stays in the journal, since this server refuses it: num_inference_steps" in caplog.text
    until(ended(client, running), "the other one")
    service, client, _ = servers.next()
    assert take_up(service) == 1
    until(ended(client, waiting), "it, where it is allowed again")


def test_one_server_at_a_time_uses_a_folder(servers: Servers) -> None:
    service, _, _ = servers.next()
    with pytest.raises(PlanError, match="another server uses it: end that one first, or use another folder"):
        RequestJournal(servers.folder)
    left = servers.folder / f".job_{'0' * 24}.part"
    left.mkdir()
    service.close()
    RequestJournal(servers.folder).close()
    assert not left.exists(), "of a server that was killed while it wrote"


def test_a_request_that_cannot_be_written_does_not_lose_the_others(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake: Any = FakeGenerator()
    service, client, _ = servers.next(fake)
    fake.gate.clear()
    names = [client.post(f"{PATH}?async=true", json=BODY).json()["id"] for _ in range(2)]
    assert fake.started.wait(20)
    save = RequestJournal.save

    def broken(journal: RequestJournal, entry: Any) -> None:
        if entry.id == names[0]:
            raise ValueError("this image has no such mode")
        save(journal, entry)

    monkeypatch.setattr(RequestJournal, "save", broken)
    service.close()
    assert fake.is_closed
    assert [each.name for each in servers.folder.iterdir()] == [names[1]]
    assert "could not be written to the journal" in caplog.text


def test_what_an_earlier_server_has_written_stays_where_the_next_one_cannot_write(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for example."""
    fake: Any = FakeGenerator()
    _, client, _ = servers.next(fake)
    fake.gate.clear()
    name = client.post(f"{PATH}?async=true", json=BODY).json()["id"]
    assert fake.started.wait(20)
    fake = FakeGenerator()
    fake.gate.clear()
    service, _, _ = servers.next(fake)
    assert take_up(service) == 1
    assert fake.started.wait(20)

    def full(*_: Any) -> None:
        raise OSError("no space is left on the device")

    with monkeypatch.context() as patch:
        patch.setattr("patchpar.serving.request_journal.json.dumps", full)
        service.close()
    assert [each.name for each in servers.folder.iterdir()] == [name], "and nothing half-written"
    service, client, _ = servers.next()
    assert take_up(service) == 1
    until(ended(client, name), "it")


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_server_that_is_killed_while_it_writes_leaves_the_old_or_the_new(tmp_path: Path, moment: int) -> None:
    """`moment`: before it sets the old folder aside, between that and the new one's name, and before it is deleted."""
    journal = RequestJournal(tmp_path)
    name = f"job_{'1' * 24}"
    for text in ("old", "new"):
        with pytest.MonkeyPatch.context() as patch:
            if text == "new":
                patch.setattr("patchpar.serving.request_journal.shutil.rmtree", stopping(shutil.rmtree, moment == 3))
                patch.setattr(Path, "replace", stopping(Path.replace, moment < 3, moment))
            with contextlib.suppress(Killed), journal.writing(name) as part:
                (part / "request.json").write_text(text)
    journal.close()
    journal = RequestJournal(tmp_path)
    assert (tmp_path / name / "request.json").read_text() == ("new" if moment == 3 else "old")
    assert [each.name for each in tmp_path.iterdir()] == [name]
    journal.close()


class Killed(BaseException):
    """Stands for the end of a process."""


def stopping(function: Any, stops: bool, at: int = 2) -> Any:
    """A function that ends the process at its call number `at`, if `stops`."""
    calls = itertools.count(1)

    def called(*args: Any, **options: Any) -> Any:
        if stops and next(calls) >= at:
            raise Killed
        return function(*args, **options)

    return called


@pytest.mark.parametrize("facts", [{"format": 2}, {"format": 1, "id": "../../x"}, {"format": 1}])
def test_a_broken_result_stays(servers: Servers, facts: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    broken = servers.folder / f"job_{'0' * 24}"
    broken.mkdir()
    (broken / "result.json").write_text(json.dumps({"id": broken.name, **facts}))
    service, client, _ = servers.next()
    assert take_up(service) == 0
    assert "cannot be taken up" in caplog.text
    assert client.get("/v1/jobs").json()["data"] == []
    assert broken.is_dir()


def test_a_result_of_another_model_is_refused(servers: Servers) -> None:
    _, client, _ = servers.next()
    created = client.post(f"{PATH}?async=true", json=BODY).json()["id"]
    until(ended(client, created), "its end")
    service, _, _ = servers.next()
    service.generator.served = type(service.generator.served)(model="/models/other", devices=("cpu",))
    with pytest.raises(PlanError, match=f"{created} is for the model fake, and this is other"):
        take_up(service)


def test_files_of_a_video_go_over(tmp_path: Path) -> None:
    old, between, new = (tmp_path / name for name in ("old", "between", "new"))
    for folder in (old, between, new):
        folder.mkdir()
    frames = np.zeros((3, 64, 48, 3), np.uint8)
    run = Run(plan=Plan(patch=2), seconds=1.5, ranks=())
    stored = VideoFiles(old).store(
        "video_a", GeneratedVideo(frames=frames, run=run, reason="as requested", figures=ImageFigures.of(run)), 8
    )
    for file in (stored.file, stored.thumbnail):
        file.rename(between / file.name)
    found = VideoFiles(new).adopt("video_a", between, json.loads(json.dumps(stored.facts)))
    assert (found.facts, found.seconds) == (stored.facts, 3 / 8)
    assert found.file == new / "video_a.mp4"
    assert found.file.read_bytes() == (between / "video_a.mp4").read_bytes()
    found.delete()
    assert list(new.iterdir()) == []
