"""Ctrl-C and SIGTERM while something computes that has no end: streams and servers end, with a sentence.

The computation is one in which Python handles no signal, in the main thread (a model is loaded) or in another one (a
first call verifies it): that of a command with one device, which is in its own process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from PIL import Image

import patchpar
from patchpar.cli import app
from patchpar.cli.shutdown import ended_by_signals
from patchpar.launch import shutdown
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.server import serve
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServerSettings
from patchpar.stream.causal.runner import StreamRunner
from patchpar.stream.images import pipeline as image_streams
from tests.breadth import first_of
from tests.cli.test_real import descendants_of
from tests.cli.test_stream import run as run_stream
from tests.forked import compute_for_ever, forked
from tests.launch.conftest import all_gone
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH
from tests.stream.tiny import write_folder

INTERRUPT, TERMINATE = (signal.SIGINT, 130), (signal.SIGTERM, 143)
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def recording(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "session.jsonl"
    result = run_stream(
        "a fox",
        "--model",
        folder,
        "--devices",
        "cpu",
        "--seconds",
        0.1,
        "--record",
        path,
        "-o",
        path.with_suffix(".mp4"),
    )
    assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder that a command must leave empty."""
    path = tmp_path / "target"
    path.mkdir()
    return path


def first_block_computes() -> None:
    StreamRunner.run = compute_for_ever  # type: ignore[method-assign]


def loading_computes() -> None:
    patchpar.StreamingPipeline.from_pretrained = compute_for_ever  # type: ignore[method-assign]


def first_image_computes() -> None:
    ranks = SimpleNamespace(call=compute_for_ever, close=lambda: None, world_size=1)
    image_streams.start_ranks = lambda *_: (ranks, "a model")  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("number", "code", "computes"),
    first_of(
        [(*end, computes) for end in (INTERRUPT, TERMINATE) for computes in (loading_computes, first_block_computes)],
        (*INTERRUPT, first_block_computes),
        (*TERMINATE, loading_computes),
    ),
)
def test_a_stream(number: signal.Signals, code: int, computes: Callable[[], None], folder: Path, target: Path) -> None:
    words = ["stream", "a fox", "--model", str(folder), "--devices", "cpu"]
    outputs = ["-o", str(target / "a.mp4"), "--record", str(target / "a.jsonl"), "--mjpeg", "0"]

    def work() -> None:
        computes()
        shutdown.SECONDS = 0.5
        app([*words, *outputs])

    with forked(work, target.parent / "errors") as child:
        child.wait_for()
        child.ends_by(number, code)
    assert list(target.iterdir()) == []


@pytest.mark.breadth
def test_a_stream_of_images(target: Path) -> None:
    Image.new("RGB", (64, 64)).save(target.parent / "a.png")
    words = ["stream", "a fox", "--input", str(target.parent), "--devices", "cpu", "-o", str(target / "a.mp4")]

    def work() -> None:
        first_image_computes()
        app(words)

    with forked(work, target.parent / "errors") as child:
        child.wait_for()
        child.ends_by(*INTERRUPT)
    assert list(target.iterdir()) == []


@pytest.mark.breadth
@pytest.mark.parametrize(("number", "code"), first_of([INTERRUPT, TERMINATE], TERMINATE))
def test_a_replay(number: signal.Signals, code: int, folder: Path, recording: Path, target: Path) -> None:
    words = ["replay", str(recording), "--model", str(folder), "--devices", "cpu", "-o", str(target / "a.mp4")]

    def work() -> None:
        first_block_computes()
        app(words)

    with forked(work, target.parent / "errors") as child:
        child.wait_for()
        child.ends_by(number, code)
    assert list(target.iterdir()) == []


def open_computes() -> None:
    shutdown.SECONDS = 0.5
    ImageGenerator.open = compute_for_ever  # type: ignore[method-assign]


def warm_up_computes() -> None:
    ImageGenerator.open = lambda self: None  # type: ignore[method-assign]
    ImageGenerator.warm_up = compute_for_ever  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("number", "code", "computes"),
    first_of(
        [(*TERMINATE, open_computes), (*INTERRUPT, warm_up_computes), (*TERMINATE, warm_up_computes)],
        (*TERMINATE, open_computes),
        (*INTERRUPT, warm_up_computes),
    ),
)
def test_a_server_that_loads(number: signal.Signals, code: int, computes: Callable[[], None], target: Path) -> None:
    """It has accepted nothing yet, so that there is nothing to finish."""

    def work() -> None:
        computes()
        app(["serve", "embedded", "--devices", "cpu", "--port", "0"])

    with forked(work, target.parent / "errors") as child:
        child.wait_for()
        child.ends_by(number, code)


def serve_a_request_that_computes() -> None:
    fake: Any = FakeGenerator()
    fake.generate = compute_for_ever

    def request(url: str, seconds: float) -> None:
        body = {"json": {"prompt": "a fox"}}
        threading.Thread(target=lambda: os.write(1, httpx.post(url + PATH, **body).read()), daemon=True).start()

    with ended_by_signals():
        serve(ImageService(fake, ServerSettings(port=0, grace=60.0)), request, lambda: os.write(1, b"ending\n"))


@pytest.mark.parametrize(
    ("first", "number", "code"),
    first_of(
        [(signal.SIGTERM, *TERMINATE), (signal.SIGTERM, *INTERRUPT), (signal.SIGINT, *TERMINATE)],
        (signal.SIGTERM, *TERMINATE),
    ),
)
def test_a_second_signal_does_not_wait_for_accepted_requests(
    first: signal.Signals, number: signal.Signals, code: int, target: Path
) -> None:
    with forked(serve_a_request_that_computes, target.parent / "errors") as child:
        child.wait_for()
        child.send(first)
        child.wait_for(b"ending")
        time.sleep(0.3)
        assert child.is_running, "it finishes what it has accepted"
        child.ends_by(number, code)
        child.wait_for(b"draining")


@pytest.mark.breadth
@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (*INTERRUPT, ("app", "--port", "0")),
        (*TERMINATE, ("stream", "a fox", "--input", ".", "--height", "1024", "--width", "1024", "-o", "target/a.mp4")),
        (*TERMINATE, ("serve", "embedded", "--port", "0")),
    ],
    ids=["app", "stream", "serve"],
)
def test_with_a_real_model(
    devices: str, number: signal.Signals, code: int, words: tuple[str, ...], target: Path
) -> None:
    """While it is loaded, or in its first call: without workers, files or a traceback left."""
    Image.new("RGB", (64, 64)).save(target.parent / "a.png")
    command = [sys.executable, "-m", "patchpar", *words, "--devices", devices]
    environment = {**os.environ, "TMPDIR": str(target)}
    process = subprocess.Popen(
        command, cwd=target.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        give_up = time.monotonic() + 240
        while len(workers := descendants_of(process.pid)) < (3 if devices == "cpu:2" else 0):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < give_up
            time.sleep(0.5)
        time.sleep(15)
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, errors
    assert f"ended by {number.name}" in errors
    assert "Traceback" not in errors
    assert [path for path in target.rglob("*") if path.is_file() or "patchpar" in path.name] == []
    assert devices == "cpu" or all_gone(workers)
