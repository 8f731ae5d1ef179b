"""What a client is not told of a failure is in the server's log, under the name that the client is told."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from starlette.requests import ClientDisconnect

from patchpar.errors import LaunchError, WorkerDied, WorkerError
from patchpar.serving.http.application import application
from patchpar.serving.http.image_socket import PATH as SOCKET
from patchpar.serving.http.job_outcome import outcome_of
from patchpar.serving.job import Job
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServerSettings
from tests.serving.fakes import MODEL, FakeGenerator
from tests.serving.requests import PATH, client_of, until

FAILURES = [WorkerError("rank 1 raised ValueError: the reason", rank=1), WorkerDied("the reason", rank=1)]


def assert_in_log(caplog: pytest.LogCaptureFixture, message: str) -> None:
    (name,) = re.findall(r"\(([^()]*)\)$", message)
    found = [each for each in caplog.records if name in each.getMessage() and each.exc_info]
    assert len(found) == 1, (message, [each.getMessage() for each in caplog.records])
    assert "the reason" in str(found[0].exc_info)
    assert "the reason" not in message


@pytest.mark.parametrize("error", FAILURES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("streams", [False, True])
def test_of_a_request(
    client: Any, fake: FakeGenerator, caplog: pytest.LogCaptureFixture, error: Exception, streams: bool
) -> None:
    fake.error = error
    text = client.post(PATH, json={"prompt": "a", "stream": streams}).text
    (message,) = re.findall(r'"message": ?"([^"]*)"', text)
    assert_in_log(caplog, message)


@pytest.mark.parametrize("error", FAILURES, ids=lambda each: type(each).__name__)
def test_of_a_job(client: Any, fake: FakeGenerator, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    fake.error = error
    path = f"/v1/jobs/{client.post(f'{PATH}?async=true', json={'prompt': 'a'}).json()['id']}"
    until(lambda: client.get(path).json()["status"] == "failed", "the job to fail")
    assert_in_log(caplog, client.get(path).json()["error"]["message"])


def test_of_an_image_of_a_socket(caplog: pytest.LogCaptureFixture) -> None:
    fake: Any = FakeGenerator()
    fake.description = replace(MODEL, parameters={**MODEL.parameters, "image": None, "strength": 0.8})
    service = ImageService(fake, ServerSettings())
    service.load()
    fake.error, file = FAILURES[0], io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    with client_of(application(service)).websocket_connect(SOCKET, headers={"host": "127.0.0.1"}) as socket:
        socket.send_json({"prompt": "a"})
        socket.receive_json()
        socket.send_bytes(file.getvalue())
        assert_in_log(caplog, socket.receive_json()["error"]["message"])
    service.close()


def test_of_workers_that_cannot_be_started_again(
    service: ImageService, fake: FakeGenerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No request waits for that, so that nobody would be told."""

    def fails(job: Job) -> None:
        raise LaunchError("the reason")

    monkeypatch.setattr(fake, "repair", fails)
    service._repair(1)
    until(lambda: any("the reason" in str(each.exc_info) for each in caplog.records), "the log")


def test_clients_that_have_gone_are_not_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody takes the end of a job that a client has left, which asyncio would say of each."""

    class Gone:
        async def receive(self) -> Any:
            return {"type": "http.disconnect"}

    def work(job: Job) -> None:
        while True:
            job.check()
            time.sleep(0.001)

    async def left() -> None:
        job = Job(work)
        thread = threading.Thread(target=job.run)
        thread.start()
        with pytest.raises(ClientDisconnect):
            await outcome_of(job, Gone())  # type: ignore[arg-type]
        thread.join()
        await asyncio.sleep(0)  # in which the loop learns of the outcome
        del job
        gc.collect()

    with caplog.at_level(logging.ERROR):
        asyncio.run(left())
        gc.collect()
    assert caplog.records == []
