"""Modular pipelines of diffusers, which are put together from blocks: split as other pipelines are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.modular_pipelines.stable_diffusion_xl import StableDiffusionXLAutoBlocks

from patchpar import ParallelPipeline, PlanError
from patchpar.pipeline.pipeline_call import no_progress_bar
from tests.tiny import build

from .conftest import EXACT, QUICK, generator, relative_error

CALL = {**QUICK, "output_type": "pt", "output": "images"}


def modular(scale: float = 5.0) -> Any:
    """A modular pipeline with the networks of a tiny SDXL, whose guider has this guidance scale."""
    found = build("sdxl").pipe.components
    pipe = StableDiffusionXLAutoBlocks().init_pipeline()
    known = {name: part for name, part in found.items() if part is not None and name in pipe.component_names}
    pipe.update_components(**known, guider=ClassifierFreeGuidance(guidance_scale=scale))
    return pipe


@pytest.fixture(scope="module")
def plain() -> Any:
    return modular()


@pytest.fixture(scope="module")
def split() -> Iterator[ParallelPipeline]:
    with ParallelPipeline(modular(), devices="cpu:2") as pipe:
        yield pipe


def images(pipe: Any, seed: int = 0, **more: Any) -> tuple[torch.Tensor]:
    return (torch.as_tensor(pipe(**{**CALL, **more}, generator=generator(seed))),)


@pytest.mark.parametrize("plan", ["patch=2", "cfg=2", "auto"])
def test_images_are_those_of_one_process(plain: Any, split: ParallelPipeline, plan: str) -> None:
    want = images(plain)
    split.plan = plan
    assert relative_error(images(split), want) <= EXACT
    assert relative_error(images(plain, seed=1), want) > 100 * EXACT
    assert split.last_run.plan.world_size == 2


def test_prompts_are_divided(plain: Any, split: ParallelPipeline) -> None:
    split.plan = "data=2"
    prompts = {"prompt": ["a small red house", "a green tree"]}
    want = images(plain, **prompts)
    assert relative_error(images(split, **prompts), want) <= EXACT
    with pytest.raises(PlanError, match="this call has 1 prompt"):
        images(split)


def test_one_rank_has_a_progress_bar(plain: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The loop that has it is a block within blocks."""
    images(plain)
    assert "2/2" in capfd.readouterr().err
    with no_progress_bar(plain):
        images(plain)
    assert capfd.readouterr().err == ""


def test_a_folder_of_one_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no diffusers model folder$"):
        ParallelPipeline.from_pretrained(tmp_path, devices="cpu:2")
    (tmp_path / "modular_model_index.json").write_text("{}")
    with pytest.raises(PlanError, match=r"load it with diffusers, and use ParallelPipeline\(pipe\)"):
        ParallelPipeline.from_pretrained(tmp_path, devices="cpu:2")
