"""The notebooks: their cells run, the first image on one device every day and on two workers with all tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchpar.pipeline.image_metrics import psnr

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
EXACT_DB = 80.0
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def cells(name: str, kind: str = "code") -> list[str]:
    """The code of a notebook, whose first cell has its parameters; or its text, `kind` "markdown"."""
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def with_levels(image: Image.Image, number: int) -> Image.Image:
    """A copy in which this many values are one level higher."""
    changed = np.array(image)
    changed.reshape(-1)[:number] += 1
    return Image.fromarray(changed)


def run(name: str, **parameters: Any) -> dict[str, Any]:
    """Run the cells with other parameters; returns what they have made."""
    first, *others = cells(name)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(first, f"{name}, parameters", "exec"), names)
    assert parameters.keys() <= names.keys(), "of the notebook's first cell"
    names |= parameters
    for number, code in enumerate(others, 1):
        exec(compile(code, f"{name}, cell {number}", "exec"), names)
    return names


def test_there_are_two() -> None:
    assert NAMES == ["first-image", "two-gpus"]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_kept_without_outputs(name: str) -> None:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    assert notebook["nbformat"] == 4
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_what_the_first_image_says_of_decibels() -> None:
    text = "".join(cells("first-image", "markdown"))
    assert "above 90 dB: one to twelve of the 196,608 values differ by one level" in text
    image = Image.new("RGB", (256, 256))
    assert psnr(with_levels(image, 12), image) > 90 > psnr(with_levels(image, 13), image)


def test_first_image_on_one_device() -> None:
    names = run("first-image", DEVICES=1, STEPS=2)
    assert isinstance(names["image"], Image.Image)
    assert names["run"].steps == 2
    assert "<table" in names["run"]._repr_html_()


@pytest.mark.breadth
def test_first_image_on_two_workers(capsys: pytest.CaptureFixture[str]) -> None:
    run("first-image", STEPS=4)
    exact, stale = (line for line in capsys.readouterr().out.splitlines() if "PSNR" in line)
    decibels = [float(re.findall(r"PSNR (\S+) dB", line)[0]) for line in (exact, stale)]
    assert decibels[0] > EXACT_DB > decibels[1], "rounding alone, after 8 bits; the control"


@pytest.mark.breadth
def test_two_gpus_on_two_workers(capsys: pytest.CaptureFixture[str]) -> None:
    models = {"SDXL": {"model": "embedded"}, "SD 1.5": {"model": "embedded"}}
    names = run("two-gpus", MODELS=models, DEVICES=["cpu", "cpu"], STEPS=3, BATTERY_MINUTES=0)
    assert [row[:2] for row in names["rows"]] == [(name, plan) for name in models for plan in names["PLANS"]]
    assert all(decibels > 50 for *_, decibels in names["rows"])
    assert '"devices"' in capsys.readouterr().out
