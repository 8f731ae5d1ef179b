"""Signals: what was accepted is finished, and the exit code says which signal it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from patchpar.cli import app as command
from patchpar.cli.shutdown import ended_by_signals
from patchpar.serving.server import serve
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH

BODY = {"prompt": "a fox"}


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_what_was_accepted(number: signal.Signals, raised: int) -> None:
    fake: Any = FakeGenerator()
    service = ImageService(fake, ServerSettings(port=0, grace=20.0))
    answers: list[Future[Any]] = []
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
            serve(service, request, fake.gate.set)
        code = getattr(ended.value, "exit_code", getattr(ended.value, "code", None))
        assert code == raised
        assert [answer.result(20).status_code for answer in answers] == [200, 200]
    assert fake.is_closed


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
        (["embedded", "--max-frames", "0"], "--max-frames"),
        (["embedded", "--files", "/nothing"], "no such folder"),
        (["embedded", "--admin-key-file", "/nothing"], "--admin-key-file"),
    ],
)
def test_what_cannot_work_is_reported_before_anything_is_started(arguments: list[str], message: str) -> None:
    response = CliRunner().invoke(command, ["serve", *arguments])
    assert response.exit_code == 2
    assert message in response.output


@pytest.mark.breadth
def test_the_command_with_two_workers() -> None:
    """As somebody starts it: an image, then SIGTERM; the workers are gone with it."""
    arguments = [sys.executable, "-m", "patchpar", "serve", "embedded", "--devices", "cpu:2", "--port", "0"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        url = re.findall(r"http://\S+", next(line for line in process.stdout if "http://" in line))[0]
        assert url.endswith(f"{PATH}")
        found = httpx.post(url, json={**BODY, "size": "64x64", "num_inference_steps": 2}, timeout=60).json()
        assert found["patchpar"]["ranks"] == 2
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 143
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
