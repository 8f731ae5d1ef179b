"""Whole programs: from standard input, in a thread, interrupted, failing, under torchrun. None leaves a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import EXACT, generator

SCRIPTS = Path(__file__).parent / "scripts"
REPOSITORY = Path(__file__).parents[2]
MARKER = "PATCHPAR_TEST_MARK"
TIMEOUT = 240.0


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment of a program; when it has ended, no process with that environment may be left."""
    beat = uuid.uuid4().hex
    yield {**os.environ, MARKER: beat, "PYTHONPATH": str(REPOSITORY)}
    give_up = time.monotonic() + 10
    while marked(beat) and time.monotonic() < give_up:
        time.sleep(0.2)
    left = marked(beat)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def marked(beat: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={beat}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended, or is another user's
    return found


@pytest.mark.breadth
def test_a_program_from_standard_input(sdxl_folder: Path, environment: dict[str, str]) -> None:
    """As in a notebook there is no file to import again. It ends by an exception, with workers running."""
    with (SCRIPTS / "from_a_thread.py").open() as script:
        result = subprocess.run(
            [sys.executable, "-", str(sdxl_folder)],
            stdin=script,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    assert "drawn" in result.stdout, result.stderr
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("LookupError: the script's own mistake")


@pytest.mark.breadth  # tests/cli has a command that is interrupted, tests/launch workers
def test_ctrl_c(sdxl_folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, str(SCRIPTS / "for_ever.py"), str(sdxl_folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as program:
        assert program.stdout is not None
        assert any("step 2" in line for line in program.stdout)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all that are in the foreground
        _, errors = program.communicate(timeout=60)
    assert program.returncode in (-signal.SIGINT, 130), errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.breadth  # tests/launch/test_torchrun has ranks that torchrun starts, with an engine that starts sooner
def test_torchrun(sdxl_folder: Path, plain: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    check_script("under_torchrun.py", [sdxl_folder, tmp_path], plain, environment)


@pytest.mark.breadth  # tests/launch has ranks on several hosts with an engine that starts sooner
def test_torchrun_on_several_hosts(sdxl_folder: Path, plain: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")
    check_script("on_several_hosts.py", [sdxl_folder, tmp_path, secret], plain, environment)


def check_script(script: str, arguments: list[Path], plain: Any, environment: dict[str, str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command = [*launcher, str(SCRIPTS / script), *map(str, arguments)]
    tmp_path, is_sealed = arguments[1], len(arguments) > 2
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert result.returncode == 0, result.stderr
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(3)]
    assert [rank["sealed"] for rank in found] == [is_sealed] * 3
    check_first_rank(found[0], plain)
    wrong = [rank["error beside an idle rank"] for rank in found]
    assert [kind for kind, _ in wrong] == ["ValueError", "ValueError", "WorkerError"]
    assert all("list of generators of length 2" in text for _, text in wrong)
    for other in found[1:]:
        for name in ("idle", "bands", "without generator", "encoders on one rank", "data"):
            kind, _, plan = found[0][name]
            assert other[name] == (kind, None, plan)
        assert other["tuple"] == (None,)
        assert other["callback"] == []
        assert torch.equal(other["state"], found[0]["state"])
        for name in ("states", "sampled"):
            assert all(torch.equal(a, b) for a, b in zip(other[name], found[0][name], strict=True))
        assert "list of generators" in other["error"] or "generator has 2 entries" in other["error"]
        assert other["module"] == "UNet2DConditionModel"


def check_first_rank(found: dict[str, Any], plain: Any) -> None:
    call = {
        "prompt": "a small red house",
        "height": 128,
        "width": 128,
        "num_inference_steps": 3,
        "output_type": "latent",
        "return_dict": False,
    }
    prompts = ["a red house", "a blue tower", "a pine"]
    ours = generator(7)

    def darken(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] * 0.9}

    plain.scheduler = type(plain.scheduler).from_config(plain.scheduler.config)  # noise has the size of its steps
    torch.manual_seed(40)
    shape, given = (1, 4, 64, 64, torch.float32, torch.device("cpu")), generator(7)
    want = [plain.prepare_latents(*shape, each) for each in (None, given, given, given)]
    assert all(torch.equal(a, b) for a, b in zip([*want, torch.randn(2)], found["sampled"], strict=True))
    assert found["idle"][0] == "StableDiffusionXLPipelineOutput"
    assert found["idle"][2] == "cfg=2"
    assert near(found["idle"][1], plain(**call, generator=ours, callback_on_step_end=darken)[0])
    assert torch.equal(found["state"], ours.get_state())
    assert found["callback"] == [(0, 3), (1, 3), (2, 3)]
    assert found["bands"][2] == "patch=3,strategy=exact"
    assert near(found["bands"][1], plain(**{**call, "height": 192}, generator=generator(7))[0])
    torch.manual_seed(20)
    assert near(found["without generator"][1], plain(**call)[0])
    assert found["encoders on one rank"][2] == "patch=3,encoders=one,strategy=exact"
    assert torch.equal(found["encoders on one rank"][1], found["bands"][1])
    assert found["data"][2] == "data=3"
    several = {**call, "prompt": prompts}
    theirs = [generator(seed) for seed in range(3)]
    assert near(found["data"][1], plain(**several, generator=theirs)[0])
    assert all(torch.equal(a, b.get_state()) for a, b in zip(found["states"], theirs, strict=True))
    assert near(found["tuple"][0], plain(**several, generator=generator(7))[0])


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and ((got - want).norm() / want.norm()).item() <= EXACT
