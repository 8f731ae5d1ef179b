"""Signals: what was accepted is finished, and the exit code says which signal it was."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from patchpar import ParallelPipeline
from patchpar.cli import app as command
from patchpar.cli.shutdown import ended_by_signals
from patchpar.pipeline.suspended_call import SuspendedCall
from patchpar.serving import server
from patchpar.serving.http import images
from patchpar.serving.image_response import response_of
from patchpar.serving.server import serve
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, until
from tests.serving.test_images import SMALL, generated, image_of

BODY = {"prompt": "a fox"}
SECONDS = 300.0


@pytest.mark.parametrize(
    ("number", "raised", "has_terminal"),
    [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)],
)
def test_a_signal_finishes_what_was_accepted(
    number: signal.Signals, raised: int, has_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the connection has gone from which the server was started, so that nothing can be printed."""
    fake: Any = FakeGenerator()
    service = ImageService(fake, ServerSettings(port=0, grace=20.0))
    answers: list[Future[Any]] = []

    def echo(*_: Any, **__: Any) -> None:
        if not has_terminal:
            raise OSError(errno.EIO, "Input/output error")

    def ending() -> None:
        fake.gate.set()
        echo()

    monkeypatch.setattr("typer.echo", echo)
    with ThreadPoolExecutor(2) as pool:

        def request(url: str, seconds: float) -> None:
            fake.gate.clear()
            answers.extend(pool.submit(httpx.post, url + PATH, json=BODY, timeout=20) for _ in range(2))
            pool.submit(fake.started.wait, 20)
            threading.Thread(target=end_it).start()

        def end_it() -> None:
            fake.started.wait(20)
            while service.waiting == 0:
                pass
            os.kill(os.getpid(), number)

        with pytest.raises(BaseException) as ended, ended_by_signals():  # noqa: PT011 - of typer or of Python
            serve(service, request, ending)
        code = getattr(ended.value, "exit_code", getattr(ended.value, "code", None))
        assert code == raised
        assert [answer.result(20).status_code for answer in answers] == [200, 200]
    assert fake.is_closed


def test_what_has_ended_is_sent_within_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are encoded after their request has left the queue, and large ones take longer than the port waits."""
    monkeypatch.setattr(server, "WRITE_SECONDS", 0)
    service = ImageService(FakeGenerator(), ServerSettings(port=0, grace=20.0))  # type: ignore[arg-type]
    encoding, is_drained = threading.Event(), threading.Event()

    def encoded(*values: Any) -> Any:
        encoding.set()
        assert is_drained.wait(20)
        time.sleep(1)  # the port would have ended by then
        return response_of(*values)

    drain = service.drain
    monkeypatch.setattr(images, "response_of", encoded)
    monkeypatch.setattr(service, "drain", lambda seconds: (drain(seconds), is_drained.set())[0])
    with ThreadPoolExecutor(1) as pool:
        answers: list[Future[Any]] = []

        def request(url: str, seconds: float) -> None:
            answers.append(pool.submit(httpx.post, url + PATH, json=BODY, timeout=20))
            assert encoding.wait(20)
            raise SystemExit(0)

        with pytest.raises(SystemExit):
            server.serve(service, request, lambda: None)
        assert answers[0].result(20).status_code == 200


def test_a_client_that_reads_nothing_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events do not fit into the buffers of the connection, and the grace period is longer than the test waits."""
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.2)
    service = ImageService(FakeGenerator(), ServerSettings(port=0, grace=10 * SECONDS))  # type: ignore[arg-type]
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8))
    monkeypatch.setattr("tests.serving.fakes.Image.new", lambda *_: noise)
    body = json.dumps({**BODY, "n": 10, "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"

    def ended(client: socket.socket) -> bool:
        with server.ModelServer(service) as found:
            found.start()
            service.load()
            client.connect(("127.0.0.1", int(found.url.rpartition(":")[2])))
            client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: bool(service.metrics.unsent.unread_for(0.1)), "a response that nobody reads")
            return found.drain()

    with ThreadPoolExecutor(1) as pool, socket.socket() as client:
        assert pool.submit(ended, client).result(SECONDS / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embedded", "--host", "0.0.0.0"], "--api-key-file"),
        (["embedded", "--api-key-file", "/nothing"], "No such file"),
        (["embedded", "--port", "70000"], "65535"),
        (["embedded", "--grace", "-1"], "--grace"),
        (["embedded", "--max-queue", "0"], "--max-queue"),
        (["embedded", "--max-pixels", "0"], "--max-pixels"),
        (["embedded", "--devices", "cpu:2", "--plan", "data=2"], "axis data"),
        (["embedded", "--devices", "cpu:2", "--plan", "patch=3"], "takes 3 devices"),
        (["embedded", "--devices", "cpu:3", "--plan", "patch=2,weights=sharded"], "takes 2 devices"),
        (["embedded", "--devices", "cpu:2", "--per-request", "3"], "use 1 to 2"),
        (["embedded", "--devices", "cpu:2", "--per-request", "0"], "use 1 to 2"),
        (["nowhere"], "no model"),
        (["embedded", "--policy", "fifo"], "latency, throughput, deadline"),
        (["embedded", "--ttl", "0"], "--ttl"),
        (["embedded", "--max-kept", "0"], "--max-kept"),
        (["embedded", "--max-kept-gb", "0"], "--max-kept-gb"),
        (["embedded", "--max-frames", "0"], "--max-frames"),
        (["embedded", "--files", "/nothing"], "no such folder"),
        (["embedded", "--admin-key-file", "/nothing"], "--admin-key-file"),
    ],
)
def test_what_cannot_work_is_reported_before_anything_is_started(arguments: list[str], message: str) -> None:
    response = CliRunner().invoke(command, ["serve", *arguments])
    assert response.exit_code == 2
    assert message in response.output


@contextmanager
def command_of(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with two workers, as somebody starts it: its process and the URL of images."""
    arguments = [sys.executable, "-m", "patchpar", "serve", "embedded", "--devices", "cpu:2", "--port", "0", *flags]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        url = re.findall(r"http://\S+", next(line for line in process.stdout if "http://" in line))[0]
        assert url.endswith(PATH)
        yield process, url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended_by(process: subprocess.Popen[str], number: signal.Signals) -> int:
    """Send a signal, and return the exit code; the workers are gone with the process."""
    os.kill(process.pid, number)
    code = process.wait(SECONDS)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return code


@pytest.mark.breadth
def test_the_command_with_two_workers() -> None:
    """An image, then SIGTERM."""
    with command_of() as (process, url):
        found = httpx.post(url, json={**BODY, "size": "64x64", "num_inference_steps": 2}, timeout=SECONDS).json()
        assert found["patchpar"]["ranks"] == 2
        assert ended_by(process, signal.SIGTERM) == 143


@pytest.mark.breadth
@pytest.mark.timeout(1200)
def test_sigterm_under_load_loses_no_finished_denoiser_call(pipe: ParallelPipeline, tmp_path: Path) -> None:
    """A result that nobody has fetched, a request that runs, one that waits, and a client who waits for a fourth."""

    def posted(url: str, seed: int, steps: int) -> str:
        body = {**SMALL, "seed": seed, "num_inference_steps": steps}
        return str(httpx.post(f"{url}?async=true", json=body, timeout=SECONDS).json()["id"])

    def job(url: str, name: str) -> Any:
        return httpx.get(f"{url.removesuffix(PATH)}/v1/jobs/{name}", timeout=SECONDS).json()

    def ended(url: str, name: str) -> Any:
        give_up = time.monotonic() + SECONDS
        while (found := job(url, name))["status"] != "completed":
            assert found["status"] in ("queued", "in_progress"), found
            assert time.monotonic() < give_up
            time.sleep(0.2)
        return found

    flags = ("--journal", str(tmp_path), "--grace", "0.1", "--plan", "cfg=2")
    with command_of(*flags) as (process, url), ThreadPoolExecutor(1) as pool:
        finished = posted(url, 1, 2)
        result = ended(url, finished)["result"]
        running, waiting = posted(url, 2, 60), posted(url, 3, 2)
        waits = pool.submit(httpx.post, url, json={**SMALL, "seed": 4, "num_inference_steps": 2}, timeout=SECONDS)
        while (step := job(url, running)["step"]) < 5 or job(url, waiting)["status"] != "queued":
            time.sleep(0.02)
        assert ended_by(process, signal.SIGTERM) == 143
        moved = str(waits.result(SECONDS).json()["error"]["message"]).rpartition("/")[2]
    names = {finished, running, waiting, moved}
    assert {each.name for each in tmp_path.iterdir()} == names
    assert SuspendedCall.load(tmp_path / running / "call.safetensors").num_calls >= step
    with command_of(*flags) as (process, url):
        assert job(url, finished)["result"] == result
        for name, seed, steps in ((running, 2, 60), (waiting, 3, 2), (moved, 4, 2)):
            (image,) = ended(url, name)["result"]["data"]
            want = generated(pipe, seed, num_inference_steps=steps)
            assert np.abs(image_of(image["b64_json"]).astype(int) - want.astype(int)).max() <= 1, "of 255, on two ranks"
        body = {**SMALL, "seed": 2, "num_inference_steps": 60}
        at_once = httpx.post(url, json=body, timeout=SECONDS).json()["data"]
        assert at_once == job(url, running)["result"]["data"], "bit for bit that of a server that does not end"
        assert ended_by(process, signal.SIGTERM) == 143
