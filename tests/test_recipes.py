"""Recipes can be copied as they are: one draws here, the others are checked up to the weights they would fetch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchpar import Plan

FOLDER = Path(__file__).parent.parent / "pipelines"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scene_is_drawn(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "scenes.py")]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert answer.returncode == 0, answer.stderr
    assert Image.open(tmp_path / "scene.png").size == (256, 256)
    assert answer.stdout.startswith("plan cfg=2: 25 steps")


class Recorder:
    """Stands for ParallelPipeline where weights would have to be fetched."""

    opened: dict[str, Any]
    called: dict[str, Any]
    last_run = "figures"

    def from_pretrained(self, model: str, **options: Any) -> Recorder:
        self.opened = {"model": model, **options}
        return self

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None: ...

    def explain(self) -> str:
        return "why"

    def __call__(self, prompt: str, **arguments: Any) -> Any:
        self.called = arguments
        return type("Output", (), {"images": [Image.new("RGB", (8, 8))]})


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_build_and_main(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, recorder = load(name), Recorder()
    monkeypatch.setattr(recipe, "ParallelPipeline", recorder)
    monkeypatch.chdir(tmp_path)
    recipe.build(Plan(cfg=2, patch=2))
    assert (recorder.opened["devices"], recorder.opened["plan"]) == (4, Plan(cfg=2, patch=2))
    recipe.main()
    assert recorder.opened["plan"] == "auto"
    assert len(list(tmp_path.glob("*.png"))) == 1
    assert "figures" in capsys.readouterr().out


def test_every_recipe_is_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text()
    assert all(f"({name}.py)" in table for name in RECIPES)
