"""`patchpar compare`: two runs with the same noise, three images, and figures that can tell a difference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from patchpar.cli.compare import ComparedRun, measure_pair

KEYS = {"plan", "seconds", "steps", "bytes_per_step", "outputs", "psnr_db", "ssim", "max_abs_diff", "speedup"}


def test_json(fake: Any, run: Any, tmp_path: Path) -> None:
    result = run("compare", "a fox", "--devices", 2, "--steps", 3, "--json", "-o", tmp_path / "fox.png")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == KEYS
    assert found["speedup"] == pytest.approx(2.0)
    assert found["max_abs_diff"] == pytest.approx(0.01)  # the fake's single run is 0.01 brighter
    assert found["psnr_db"] == pytest.approx(40.0)
    names = ["fox-difference.png", "fox-plan.png", "fox-single.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert sorted(Path(path).name for path in found["outputs"]) == names


def test_both_runs_start_from_the_same_noise_and_are_warm(fake: Any, run: Any, tmp_path: Path) -> None:
    run("compare", "a fox", "--devices", 2, "--steps", 3, "-o", tmp_path / "fox.png")
    planned, single = fake.opened
    assert planned.options["devices"] == "2"
    assert single.options["devices"] == ("cpu",)
    assert [call["num_inference_steps"] for call in planned.calls] == [2, 3]
    assert [call["num_inference_steps"] for call in single.calls] == [2, 3]
    states = [pipe.calls[-1]["generator"].get_state() for pipe in (planned, single)]
    assert bool((states[0] == states[1]).all())


def test_text(fake: Any, run: Any, tmp_path: Path) -> None:
    result = run("compare", "a fox", "--devices", 2, "-o", tmp_path / "fox.png")
    assert "speed-up 2.00x" in result.stdout
    assert "PSNR 40.0 dB" in result.stdout
    assert "largest difference 1.00e-02" in result.stdout


def test_the_worst_image_counts() -> None:
    run, image = SimpleNamespace(seconds=1.0), np.full((16, 16, 3), 0.5)
    figures = measure_pair(ComparedRun(run, [image, image]), ComparedRun(run, [image, image + 0.1]))
    assert figures["psnr_db"] == pytest.approx(20.0)
    assert figures["max_abs_diff"] == pytest.approx(0.1)
    assert measure_pair(ComparedRun(run, [image]), ComparedRun(run, [image]))["psnr_db"] == math.inf


def test_equal_images_are_null_in_json(fake: Any, run: Any, tmp_path: Path) -> None:
    result = run("compare", "a fox", "--devices", "cpu", "--json", "-o", tmp_path / "fox.png")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "Infinity" not in result.stdout
    assert (found["psnr_db"], found["max_abs_diff"]) == (None, 0.0)


def test_an_output_that_cannot_be_written(fake: Any, run: Any, tmp_path: Path) -> None:
    result = run("compare", "a fox", "-o", tmp_path / "missing" / "fox.png")
    assert result.exit_code == 2
    assert not fake.opened


def test_not_under_torchrun(fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    result = run("compare", "a fox", "-o", tmp_path / "fox.png")
    assert result.exit_code == 2
    assert "start it without torchrun" in result.stderr
    assert not fake.opened


def test_several_strategies_are_a_table(fake: Any, run: Any, tmp_path: Path) -> None:
    words = ["--devices", 2, "--plan", "patch=2", "--strategy", "pcpp", "--strategy", "fresh-edges:bits=8"]
    result = run("compare", "a fox", *words, "-o", tmp_path / "fox.png")
    assert result.exit_code == 0, result.output
    assert [str(pipe.options["plan"].strategy) for pipe in fake.opened] == ["pcpp", "fresh-edges:bits=8", "exact"]
    assert result.stdout.count("  cfg=2") == 2  # the plan of the fake's runs
    sides = ("fresh-edges-bits-8", "pcpp")
    names = [f"fox-{side}{end}.png" for side in sides for end in ("-difference", "")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "fox-single.png"])
    result = run("compare", "a fox", *words, "--json", "-o", tmp_path / "fox.png")
    assert [set(each) >= KEYS - {"outputs"} for each in json.loads(result.stdout)["runs"]] == [True, True]


def test_what_has_no_one_reference_is_refused_before_anything_runs(fake: Any, run: Any, tmp_path: Path) -> None:
    words = ["--devices", 2, "--plan", "patch=2", "--strategy", "structure", "--strategy", "pcpp"]
    result = run("compare", "a fox", *words, "-o", tmp_path / "fox.png")
    assert (result.exit_code, "compare it without other strategies" in result.stderr) == (2, True), result.output
    assert fake.opened == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "pcpp", "--strategy", "pcpp"], "--strategy pcpp is given twice"),
        (["--strategy", "pcpp", "--strategy", "exact", "--trace", "t.json"], "it is of one run"),
        (["--strategy", "exact", "--strategy", "exact:"], "--strategy exact, exact:: files of two would have one name"),
        (["--steps", 3, "--steps", 4], "'--steps': it is given 2 times, but takes one value"),
    ],
)
def test_what_is_given_twice(fake: Any, run: Any, words: list[Any], message: str) -> None:
    result = run("compare", "a fox", "--plan", "patch=2", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not fake.opened
