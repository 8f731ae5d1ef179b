"""Recipes can be copied as they are: their own code runs here, on tiny pipelines where weights would be fetched."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
from PIL import Image

from patchpar import Plan, PlanError
from tests import tiny
from tests.breadth import first_of
from tests.pipeline.pool import Hold
from tests.tiny import sample_images

FOLDER = Path(__file__).parent.parent / "pipelines"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))
FAMILIES = {
    "cogvideox": "cogvideox",
    "dit": "dit",
    "flux": "flux",
    "flux2": "flux2",
    "hunyuan_video": "hunyuan_video",
    "ltx": "ltx",
    "pixart_sigma": "pixart",
    "qwen_image": "qwen",
    "qwen_image_edit": "qwen_edit",
    "sd35": "sd3",
    "sdxl": "sdxl",
    "wan_i2v": "wan_i2v_two",
    "wan_t2v": "wan_two",
    "z_image": "zimage",
}
"""The tiny pipeline that each recipe runs on, whose weights would be fetched."""
TINY = FAMILIES | {"scenes": "sdxl"}
MEANT = ("prompt", "negative_prompt", "guidance_scale", "true_cfg_scale", "image", "class_labels")
"""Arguments that are the recipe's own. The others of a tiny call are sizes, which a tiny model has its own of."""


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Loaded:
    """Stands for ParallelPipeline: `from_pretrained` gives workers that hold a tiny pipeline, under a plan for two."""

    def __init__(self, workers: Any, found: tiny.Tiny, plan: Plan) -> None:
        self.workers, self.plan = workers, plan
        self.sizes = {name: value for name, value in found.call_kwargs.items() if name not in MEANT}
        self.opened: dict[str, Any] = {}

    def from_pretrained(self, model: str, **options: Any) -> Loaded:
        self.opened = {"model": model, **options}
        self.workers.plan = self.plan
        return self

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        return self.workers(*args, **(arguments | self.sizes | {"num_inference_steps": 2}))

    def explain(self) -> str:
        return self.workers.explain()

    @property
    def last_run(self) -> Any:
        return self.workers.last_run


@pytest.fixture
def unopened(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, tiny.Tiny]:
    """The module of a recipe and its tiny pipeline, which nobody holds yet, in a folder with an image."""
    module, found = load(request.param), tiny.build(TINY[request.param])
    vae = found.pipe.vae
    monkeypatch.setattr(type(vae), "from_pretrained", lambda *_, **__: vae)  # some recipes open it beforehand
    monkeypatch.setattr(module, "ParallelPipeline", Loaded(SimpleNamespace(), found, Plan(patch=2)))
    monkeypatch.chdir(tmp_path)
    sample_images.scene(64, 64).save("image.png")
    return module, found


@pytest.fixture
def recipe(unopened: tuple[Any, tiny.Tiny], hold: Hold) -> Iterator[Any]:
    """The module of a recipe that opens a tiny pipeline in workers."""
    module, found = unopened
    with hold(found.pipe) as workers:
        module.ParallelPipeline.workers = workers
        yield module


def plans_for_two(plan: Plan) -> list[Plan]:
    """What becomes of a recipe's plan on two ranks."""
    return [Plan(**{axis: 2}) for axis, degree in plan.degrees().items() if degree > 1]


def result_in(folder: Path) -> tuple[int, int]:
    """Number of frames and height of what a recipe has written."""
    (written,) = (path for path in folder.iterdir() if path.name != "image.png")
    if written.suffix == ".png":
        return 1, Image.open(written).size[1]
    with av.open(str(written)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return len(frames), frames[0].shape[0]


@pytest.mark.breadth
@pytest.mark.parametrize("unopened", ["scenes"], indirect=True)
def test_the_scene_s_own_code(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.main()
    assert result_in(tmp_path) == (1, 128)
    assert capsys.readouterr().out.startswith(f"plan {recipe.ParallelPipeline.plan}: 2 steps")


@pytest.mark.breadth
def test_the_scene_is_generated(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "scenes.py")]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert answer.returncode == 0, answer.stderr
    assert Image.open(tmp_path / "scene.png").size == (256, 256)
    assert answer.stdout.startswith("plan cfg=2: 25 steps")


@pytest.mark.parametrize("unopened", first_of(FAMILIES, "z_image"), indirect=True)
def test_the_recipe_s_own_code_on_two_ranks(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under each axis of its plan; and where the plan leaves guidance whole, there is none to split."""
    loaded = recipe.ParallelPipeline
    wanted = getattr(recipe, "PLAN", Plan(cfg=2, patch=2))
    for plan in plans_for_two(wanted):
        loaded.plan = plan
        recipe.main()
        frames, height = result_in(tmp_path)
        assert (frames, height) == (loaded.sizes.get("num_frames", 1), loaded.sizes.get("height", 128))
        assert f"plan {plan}: 2 steps" in capsys.readouterr().out
    if wanted.cfg == 1:
        loaded.plan = Plan(cfg=2)
        with pytest.raises(PlanError, match="this call uses none"):
            recipe.main()


@pytest.mark.parametrize("unopened", FAMILIES, indirect=True)
def test_it_opens_its_model_in_half_precision_on_as_many_devices_as_its_plan_takes(unopened: Any) -> None:
    recipe, _ = unopened
    loaded = recipe.ParallelPipeline
    if hasattr(recipe, "PLAN"):
        assert 2 <= recipe.PLAN.world_size <= 8
        recipe.build()
        assert (loaded.opened["devices"], loaded.opened["plan"]) == (recipe.PLAN.world_size, recipe.PLAN)
    else:
        recipe.build()
        assert loaded.opened["plan"] == "auto"
    recipe.build(Plan(cfg=2, patch=3))
    assert (loaded.opened["devices"], loaded.opened["plan"]) == (6, Plan(cfg=2, patch=3))
    assert "float16" in str(loaded.opened["torch_dtype"])


def test_a_recipe_is_short_and_stands_alone() -> None:
    assert set(FAMILIES) | {"scenes"} == set(RECIPES)
    for name in RECIPES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 40, name
        assert not any(f"import {other}" in text or f"from {other}" in text for other in RECIPES), name


def test_every_recipe_is_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text()
    assert all(f"({name}.py)" in table for name in RECIPES)
