"""The command line on the embedded model with real workers; and everything that must be refused before they start."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchpar.models.files import embedded_model
from tests.breadth import first_of
from tests.launch.conftest import all_gone
from tests.tiny import build

PROMPT = "a red house on the left and a pine on the right, green hills at sunset"
QUICK = ("--steps", "2", "--height", "128", "--width", "128")


def patchpar(*words: object, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "patchpar", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def assert_libraries_are_silent(stderr: str) -> None:
    """What libraries tell developers is no news to somebody who wants an image."""
    for noise in ("Warning", "deprecated", "torchvision", "should be kept in float32", "Loading pipeline"):
        assert noise not in stderr, stderr


def assert_generated(code: int, stdout: str, stderr: str, target: Path) -> None:
    assert code == 0, stderr
    assert Image.open(target).size == (128, 128)
    first, saved = stdout.strip().splitlines()
    assert "cfg=2" in first
    assert "sent per step and rank" in first
    assert saved == f"saved {target}"
    assert "Traceback" not in stderr
    assert_libraries_are_silent(stderr)


def test_two_workers_generate_an_image(run: Any, tmp_path: Path) -> None:
    """In this process, whose workers start at once."""
    target = tmp_path / "demo.png"
    result = run("generate", PROMPT, "--devices", 2, *QUICK, "--output", target)
    assert_generated(result.exit_code, result.stdout, result.stderr, target)


@pytest.mark.breadth  # tests/app has a command that is started as people start it
def test_two_workers_of_a_new_process_generate_an_image(tmp_path: Path) -> None:
    target = tmp_path / "demo.png"
    result = patchpar("generate", PROMPT, "--devices", 2, *QUICK, "--output", target)
    assert_generated(result.returncode, result.stdout, result.stderr, target)


@pytest.mark.breadth
def test_json_of_generate(tmp_path: Path) -> None:
    target = tmp_path / "x.png"
    result = patchpar("generate", PROMPT, "--devices", "cpu:2", "--plan", "patch=2", *QUICK, "--json", "-o", target)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(found) >= {"plan", "seconds", "steps", "bytes_per_step", "outputs"}
    assert found["plan"] == "patch=2,strategy=exact"
    assert found["steps"] == 2
    assert len(found["bytes_per_step"]) == 2
    assert min(found["bytes_per_step"]) > 0
    assert found["outputs"] == [str(target)]


@pytest.mark.breadth
def test_compare_sees_that_exact_is_exact(run: Any, tmp_path: Path) -> None:
    flags = ("--devices", 2, "--plan", "patch=2", *QUICK, "--json", "-o", tmp_path / "x.png")
    result = run("compare", PROMPT, *flags)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["psnr_db"] is None or found["psnr_db"] > 90
    assert found["ssim"] > 0.9999
    assert found["max_abs_diff"] < 1e-3
    assert all(Path(path).is_file() for path in found["outputs"])


@pytest.mark.breadth
def test_doctor() -> None:
    result = patchpar("doctor", "--devices", 2, "--json")
    assert result.returncode == 0, result.stderr
    assert_libraries_are_silent(result.stderr)
    found = json.loads(result.stdout)
    assert found["collective"]["ok"]
    assert "cfg=2" in found["plan"]["chosen"]


def after_signal(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """What it had said when it ended.

    Python loses an interrupt that falls into a callback of its own, as while modules are imported: then once more.
    """
    for seconds in (20, 60):
        os.kill(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=seconds)[1]
    raise AssertionError(f"{number.name} did not end it, twice")


def descendants_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    children = [int(word) for word in found.stdout.split()]
    return children + [below for child in children for below in descendants_of(child)]


@pytest.mark.parametrize(("number", "code"), first_of([(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_a_signal_to_end_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    words = ("generate", PROMPT, "--devices", "2", "--steps", "500", "--output", str(tmp_path / "x.png"))
    process = subprocess.Popen([sys.executable, "-m", "patchpar", *words], stderr=subprocess.PIPE, text=True)
    give_up = time.monotonic() + 180
    while len(workers := descendants_of(process.pid)) < 3 and time.monotonic() < give_up:
        time.sleep(0.2)
    time.sleep(5)
    errors = after_signal(process, number)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert f"ended by {number.name}" in errors
    assert not list(tmp_path.iterdir())
    assert all_gone(workers)


def copy_of_the_model(folder: Path) -> Path:
    return Path(shutil.copytree(embedded_model(), folder / "model"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--height", "100"], ["100", "96", "104"]),
        pytest.param(  # workers say so, as in tests/pipeline/test_bad_input.py
            ["--height", "32", "--width", "32", "--devices", "cpu:3", "--plan", "patch=3"],
            ["3 ranks", "at most 2", "48 pixels"],
            marks=pytest.mark.breadth,
        ),
        (["--devices", "cpu:3", "--plan", "cfg=2,patch=2"], ["4 devices", "3"]),
        (["--plan", "rows=2"], ["rows", "data, cfg, stage, patch, tensor"]),
        (["--devices", "cpu:2", "--plan", "patch=2", "--strategy", "psychic"], ["psychic", "exact"]),
        (["--devices", "cpu:2", "--plan", "patch=2", "--strategy", "exact:speed=9"], ["speed", "exact"]),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
        (["--steps", "-1"], ["--steps -1", "at least 1"]),
        (["--model", "no/such/model"], ["no/such/model"]),
        (["--devices", "cuda:0,cuda:0"], ["cuda:0"]),
        (["--devices", "tpu"], ["tpu", "cpu:4"]),
        (["--devices", "0"], ["0", "at least 1"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_bad_use_is_refused_before_the_run(run: Any, tmp_path: Path, flags: list[str], words: list[str]) -> None:
    steps = [] if "--steps" in flags else ["--steps", "2"]
    result = run("generate", PROMPT, *steps, *flags, "-o", tmp_path / "x.png")
    assert result.exit_code == 2, result.output
    assert all(word in result.stderr for word in words), result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("*.png"))


def test_a_folder_without_safetensors(run: Any, tmp_path: Path) -> None:
    model = copy_of_the_model(tmp_path)
    weights = model / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    result = run("generate", PROMPT, "--model", model, "--variant", "fp16", "-o", tmp_path / "x.png")
    assert result.exit_code == 2, result.output
    assert str(model / "unet") in result.stderr
    assert "safetensors" in result.stderr


@pytest.mark.breadth
def test_a_transformer_on_two_workers(run: Any, tmp_path: Path) -> None:
    build("flux").pipe.save_pretrained(tmp_path / "model")
    small = ("--height", "128", "--width", "128", "--steps", "2")
    flags = ("--devices", "cpu:2", "--plan", "patch=2")
    result = run("generate", PROMPT, "--model", tmp_path / "model", *small, *flags, "-o", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    assert "patch=2,strategy=exact" in result.output
    assert Image.open(tmp_path / "x.png").size == (128, 128)


@pytest.mark.parametrize("keep", [100, 100_000])
def test_a_corrupt_weight_file(run: Any, tmp_path: Path, keep: int) -> None:
    model = copy_of_the_model(tmp_path)
    weights = model / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    result = run("generate", PROMPT, "--model", model, "--variant", "fp16", "-o", tmp_path / "x.png")
    assert result.exit_code == 2, result.output
    assert str(weights) in result.stderr


def test_not_enough_memory(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchpar.models.files.free_memory", lambda: 10 * 2**20)
    result = run("generate", PROMPT, "--devices", "cpu:2", "-o", tmp_path / "x.png")
    assert result.exit_code == 2, result.output
    assert "MiB are free" in result.stderr


@pytest.mark.breadth
def test_under_torchrun_each_process_is_a_rank(tmp_path: Path) -> None:
    target = tmp_path / "x.png"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "patchpar"]
    words = ["generate", PROMPT, *QUICK, "--json", "-o", str(target)]
    result = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["plan"] == "cfg=2"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert all(rank["bytes_sent"]["guidance"] > 0 for rank in found["ranks"])
    assert Image.open(target).size == (128, 128)
