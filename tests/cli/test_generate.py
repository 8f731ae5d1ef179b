"""`patchpar generate` as a person sees it: what it passes on, where it writes, what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diffusers import DDIMScheduler
from PIL import Image

from patchpar import Plan
from patchpar.errors import PlanError, WorkerDied


def test_writes_the_image_and_says_so(fake: Any, run: Any, tmp_path: Path) -> None:
    target = tmp_path / "fox.png"
    result = run("generate", "a fox", "--devices", 2, "--output", target)
    assert result.exit_code == 0, result.output
    assert Image.open(target).size == (16, 16)
    assert f"saved {target}" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["fox.png"]
    (pipe,) = fake.opened
    assert (pipe.model, pipe.options["devices"], pipe.options["plan"], pipe.closed) == ("embedded", "2", "auto", True)


def test_saves_while_the_workers_stop(fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large PNG takes seconds, and so may workers: the file is there before they are gone."""
    target, found = tmp_path / "fox.png", list[bool]()

    def stop(self: Any, *_: object) -> None:
        deadline = time.monotonic() + 30
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(target.exists())

    monkeypatch.setattr(fake, "__exit__", stop)
    result = run("generate", "a fox", "--output", target)
    assert result.exit_code == 0, result.output
    assert found == [True]


def test_passes_every_argument_on(fake: Any, run: Any, tmp_path: Path) -> None:
    flags = ["--steps", 4, "--height", 64, "--width", 96, "--guidance-scale", 3.5, "--seed", 7]
    more = ["--negative-prompt", "fog", "--num-images", 2, "--dtype", "float16", "--variant", "fp16"]
    result = run("generate", "a fox", *flags, *more, "-o", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    (pipe,) = fake.opened
    (call,) = pipe.calls
    assert [generator.initial_seed() for generator in call.pop("generator")] == [7, 8]
    assert call == {
        "prompt": "a fox",
        "negative_prompt": "fog",
        "height": 64,
        "width": 96,
        "num_inference_steps": 4,
        "guidance_scale": 3.5,
        "num_images_per_prompt": 2,
    }
    assert pipe.options["torch_dtype"] == "float16"
    assert pipe.options["variant"] == "fp16"


def test_what_is_not_said_is_not_passed(fake: Any, run: Any, tmp_path: Path) -> None:
    run("generate", "a fox", "-o", tmp_path / "x.png")
    (pipe,) = fake.opened
    assert set(pipe.calls[0]) == {"prompt", "generator"}
    assert set(pipe.options) == {"deadline", "devices", "plan", "vae"}


def test_steps_as_graphs_where_they_can_be(fake: Any, run: Any, tmp_path: Path) -> None:
    run("generate", "a fox", "-o", tmp_path / "x.png", "--graphs")
    assert fake.opened[0].options["graphs"] == "auto"


@pytest.mark.parametrize(("verb", "times"), [("generate", 1), ("compare", 2)])
def test_what_hosts_know_one_another_by_is_passed_on(
    fake: Any, run: Any, tmp_path: Path, verb: str, times: int
) -> None:
    run(verb, "a fox", "-o", tmp_path / "x.png", "--secret-file", "my.secret")
    run(verb, "a fox", "-o", tmp_path / "x.png", "--trusted-network")
    secret, trusted = [Path("my.secret")], [True]
    assert [pipe.options.get("secret_file") for pipe in fake.opened] == secret * times + [None] * times
    assert [pipe.options.get("trusted_network") for pipe in fake.opened] == [None] * times + trusted * times


def test_several_images_are_numbered(fake: Any, run: Any, tmp_path: Path) -> None:
    result = run("generate", "a fox", "a pine", "--negative-prompt", "fog", "--num-images", 2, "-o", tmp_path / "x.jpg")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-1.jpg", "x-2.jpg", "x-3.jpg", "x-4.jpg"]
    assert fake.opened[0].calls[0]["negative_prompt"] == ["fog", "fog"]


def test_a_plan_is_parsed(fake: Any, run: Any, tmp_path: Path) -> None:
    run("generate", "a fox", "--plan", "cfg=2,patch=2", "-o", tmp_path / "x.png")
    plan = fake.opened[0].options["plan"]
    assert plan == Plan(cfg=2, patch=2, strategy="exact")


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("rows=2", "unknown axis 'rows' in plan 'rows=2': use data, cfg, stage, patch, tensor"),
        ("patch=two", "patch=two: the degree of an axis is a whole number"),
        ("patch=0", "the degree of an axis is a whole number of at least 1"),
        ("", "--plan is empty, as a variable of the shell that is not set: leave it out, or use axes"),
        (" , ", "--plan is empty"),
    ],
)
def test_a_plan_that_makes_no_sense(fake: Any, run: Any, tmp_path: Path, plan: str, text: str) -> None:
    result = run("generate", "a fox", "--plan", plan, "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert text in result.stderr
    assert not fake.opened


@pytest.mark.parametrize("text", ["auto", "4", "cpu:4", "cpu,cpu"])
def test_devices_are_the_business_of_the_pipeline(fake: Any, run: Any, tmp_path: Path, text: str) -> None:
    run("generate", "a fox", "--devices", text, "-o", tmp_path / "x.png")
    assert fake.opened[0].options["devices"] == text


def test_json_is_one_object_and_alone(fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "noisy", True)
    result = run("generate", "a fox", "--devices", 2, "--json", "-o", tmp_path / "x.png")
    found = json.loads(result.stdout)
    assert set(found) == {"plan", "seconds", "steps", "bytes_per_step", "outputs"}
    assert found["outputs"] == [str(tmp_path / "x.png")]
    assert found["bytes_per_step"] == [10, 10]
    assert "a library talks" in result.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/x.png", "there is no folder"),
        ("x.txt", "'.txt' names no image format; use one of .png"),
        ("x", "names no image format"),
        ("folder.png", "it is a folder"),
    ],
)
def test_a_path_that_cannot_be_written_stops_it_before_the_run(
    fake: Any, run: Any, tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    result = run("generate", "a fox", "-o", tmp_path / name)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert str(tmp_path / name) in result.stderr
    assert result.stdout == ""
    assert not fake.opened


def test_no_permission_stops_it_before_the_run(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere, so chmod proves nothing
    result = run("generate", "a fox", "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "no permission" in result.stderr
    assert not fake.opened


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder in which nobody can make a file is Linux's")
def test_a_file_system_that_takes_no_file_stops_it_before_the_run(fake: Any, run: Any) -> None:
    """Root has the permission, and the file system makes none all the same."""
    result = run("generate", "a fox", "-o", "/proc/x.png")
    assert result.exit_code == 2
    assert "cannot write /proc/x.png" in result.stderr
    assert not fake.opened


def test_no_half_written_file(fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Image.Image, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    target = tmp_path / "x.png"
    target.write_bytes(b"the old picture")
    monkeypatch.setattr(Image.Image, "save", breaks)
    result = run("generate", "a fox", "-o", target)
    assert result.exit_code == 1
    assert "no space left" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert target.read_bytes() == b"the old picture"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PlanError("axis 'patch' has 8 ranks: use at most 5"), 2, "error: axis 'patch' has 8 ranks: use at most 5\n"),
        (WorkerDied("rank 1 died"), 1, "error: rank 1 died\n"),
        (RuntimeError("boom"), 1, "error: RuntimeError: boom (--debug shows where)\n"),
    ],
)
def test_errors_are_for_the_person(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
) -> None:
    monkeypatch.setattr(fake, "error", error)
    result = run("generate", "a fox", "-o", tmp_path / "x.png")
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())
    assert fake.opened[0].closed
    assert "Traceback" in run("generate", "a fox", "--debug", "-o", tmp_path / "x.png").stderr


@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_steps_that_the_scheduler_refuses(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """In one sentence, as of any flag; an error that the scheduler does not raise stays what it is."""
    monkeypatch.setattr(fake, "scheduler", DDIMScheduler(), raising=False)
    with pytest.raises(ValueError, match="99999 cannot be larger") as refused:
        DDIMScheduler().set_timesteps(99999)
    monkeypatch.setattr(fake, "error", ValueError(f"{refused.value}\n\nTraceback of a rank"))
    result = run(verb, "a fox", "--steps", 99999, "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "error: --steps 99999: DDIMScheduler, the scheduler of this model, refuses it" in result.stderr
    assert "1000 timesteps): use another number, or another --scheduler\n" in result.stderr
    monkeypatch.setattr(fake, "error", ValueError("boom"))
    assert "error: ValueError: boom" in run(verb, "a fox", "--steps", 99999, "-o", tmp_path / "x.png").stderr


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--steps", "0"], "--steps 0: it must be at least 1"),
        (["--steps", "-3"], "--steps -3: it must be at least 1"),
        (["--num-images", "0"], "--num-images 0: it must be at least 1"),
        (["--width", "-8"], "--width -8: it must be at least 1"),
        (["--seed", str(2**64)], f"--seed {2**64}: it must be from {-(2**63)} to {2**64 - 1}"),
        (["--seed", str(2**64 - 1), "--num-images", "2"], f"to {2**64 - 2}"),
        (["--height", "tall"], "Invalid value for '--height'"),
        (["--dtype", "int8"], "'float32', 'float16', 'bfloat16'"),
        (["--colour", "red"], "No such option"),
    ],
)
def test_flags_that_make_no_sense(fake: Any, run: Any, tmp_path: Path, flags: list[str], text: str) -> None:
    result = run("generate", "a fox", *flags, "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert not fake.opened


def test_a_file_among_the_prompts_is_what_a_shell_has_made_of_a_pattern(fake: Any, run: Any, tmp_path: Path) -> None:
    """`--lora *.safetensors` gives the flag the first file, and an image to each of the others."""
    (tmp_path / "b.safetensors").touch()
    result = run("generate", "a fox", tmp_path / "b.safetensors", "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "b.safetensors' is a file here: a flag takes one value" in " ".join(result.stderr.split())
    assert not fake.opened
    assert run("generate", "a fox.", "a" * 5000 + ".b", "a\0.c", "-o", tmp_path / "x.png").exit_code == 0, "the control"


def test_a_prompt_is_needed(fake: Any, run: Any) -> None:
    result = run("generate")
    assert result.exit_code == 2
    assert "Missing argument" in result.stderr


def test_a_model_that_makes_something_else(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "__call__", lambda *_, **__: SimpleNamespace(frames=[]))
    result = run("generate", "a fox", "-o", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "has no images" in result.stderr


def test_a_rank_without_a_result_says_and_writes_nothing(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "__call__", lambda *_, **__: SimpleNamespace(images=None))
    result = run("generate", "a fox", "-o", tmp_path / "x.png")
    assert (result.exit_code, result.stdout) == (0, "")
    assert not list(tmp_path.iterdir())
