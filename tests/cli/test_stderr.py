"""What every verb writes to stderr is our own: no library's warning, no progress bar of a download, no leak at the end.

Each verb is a process of its own, as people start it: what libraries write below Python is seen too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from patchpar.cli.verbs import VERBS
from tests.cli.our_lines import foreign
from tests.cli.test_fifo import without_stream_json
from tests.stream.test_convert import HIGH_NOISE, SAFETENSORS, original, prefixed
from tests.stream.tiny import COLUMNS, ROWS, TEXT, write_folder
from tests.tiny import build

PROMPT = "a red house on the left and a pine on the right, green hills at sunset"
QUICK = ("--steps", 2, "--height", 128, "--width", 128)
TWO = ("--devices", "cpu:2", "--plan", "patch=2")
SERVERS = ("app", "serve")


def folder_of_streams(folder: Path) -> Path:
    return write_folder(folder / "stream")


def generate(folder: Path) -> list[object]:
    return [PROMPT, *TWO, *QUICK, "-o", folder / "a.png"]


def upscale(folder: Path) -> list[object]:
    Image.new("RGB", (64, 64), "teal").save(folder / "small.png")
    return [folder / "small.png", "--prompt", PROMPT, "--steps", 4, *TWO, "-o", folder / "a.png"]


def video(folder: Path) -> list[object]:
    build("wan").pipe.save_pretrained(folder / "wan")
    words = ["a boat", "--model", folder / "wan", "--devices", "cpu:2", "--plan", "cfg=2", "--num-frames", 5]
    return [*words, *QUICK, "-o", folder / "a.mp4"]


def stream(folder: Path) -> list[object]:
    words = ["a fox", "--model", folder_of_streams(folder), "--devices", "cpu:2", "--seconds", 0.1]
    return [*words, "--record", folder / "session.jsonl", "-o", folder / "a.mp4"]


def fifo(folder: Path) -> list[object]:
    size = ("--height", 2 * ROWS, "--width", 2 * COLUMNS, "--fps", 20, "--text-tokens", TEXT, "--seconds", 0.1)
    queue = ("--window", 4, "--partitions", 2, "--first-steps", 2)
    model = without_stream_json(folder_of_streams(folder))
    return ["a fox", "--model", model, "--devices", "cpu", *size, *queue, "-o", folder / "a.mp4"]


def replay(folder: Path) -> list[object]:
    assert run("stream", stream(folder)).returncode == 0
    return [folder / "session.jsonl", "--devices", "cpu", "--model", folder / "stream"]  # in the process of the command


def convert(folder: Path) -> list[object]:
    base = write_folder(folder / "base", hears=False)
    (base / "stream.json").unlink()
    weights = load_file(base / HIGH_NOISE / SAFETENSORS)
    torch.save({"generator_ema": prefixed("model.", original(weights))}, folder / "dmd.pt")
    return [folder / "dmd.pt", "--to", folder / "model", "--base", base]


WORDS: dict[str, Callable[[Path], list[object]]] = {
    "generate": generate,
    "upscale": upscale,
    "video": video,
    "stream": stream,
    "replay": replay,
    "fifo": fifo,
    "convert": convert,
    "compare": lambda folder: [PROMPT, *TWO, *QUICK, "-o", folder / "a.png"],
    "bench": lambda folder: [PROMPT, "--devices", "cpu:2", *QUICK, "--strategy", "pcpp", "-o", folder / "bench"],
    "simulate": lambda _: ["embedded", "--machine", "4xRTX4090-pcie4", "--plan", "patch=4"],
    "plan": lambda _: ["embedded", "--machine", "2xRTX4090-pcie4"],
    "tune": lambda _: ["--devices", "cpu:2"],
    "app": lambda _: ["--port", 0, "--devices", "cpu:2"],
    "serve": lambda _: ["embedded", "--port", 0, "--devices", "cpu:2"],
    "doctor": lambda _: ["--devices", "cpu:2"],
}


def run(verb: str, words: list[object], home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The verb, to its end; a server until it says where it is."""
    environment = {**os.environ, **({} if home is None else {"HOME": str(home)})}
    command = [sys.executable, "-m", "patchpar", verb, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        if verb in SERVERS:
            first = next((line for line in process.stdout if "http://" in line), "")
            assert first
            process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=280)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.mark.breadth
@pytest.mark.parametrize("verb", VERBS)
def test_only_our_lines_are_on_stderr(verb: str, tmp_path: Path) -> None:
    found = run(verb, WORDS[verb](tmp_path), tmp_path if verb == "tune" else None)
    is_busy = verb == "tune" and found.stdout.startswith("busy ")  # other programs have the cores, which it refuses
    assert found.returncode == (130 if verb in SERVERS else int(is_busy)), found.stderr
    assert foreign(found.stderr) == []


def test_every_verb_is_here() -> None:
    assert list(WORDS) == list(VERBS)


@pytest.mark.parametrize(
    "line",
    [
        "/site-packages/x.py:3: FutureWarning: `torch_dtype` is deprecated! Use `dtype` instead!",
        "Using `CLIPImageProcessor` requires torchvision",
        "Loading pipeline components...: 100%|██████████| 7/7 [00:00<00:00, 20.46it/s]",
        "[rank0]:[W1126 04:30:00] Warning: destroy_process_group() was not called",
        "nanobind: leaked 3 instances!",
        "resource_tracker: There appear to be 1 leaked shared_memory objects",
    ],
)
def test_what_a_library_says_would_be_seen(line: str) -> None:
    bar = "  generating ━━━━━━━━━━━━━━━━━━━━ 2/2 0:00:03\n  under patch=2,strategy=exact ━━━━━ 2/2 0:01:35\n"
    assert foreign(bar) == []
    assert foreign(bar + line + "\n") == [line]
