"""Modular pipelines of diffusers, which are put together from blocks: split as other pipelines are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.modular_pipelines.flux import FluxAutoBlocks
from diffusers.modular_pipelines.stable_diffusion_xl import StableDiffusionXLAutoBlocks

from patchpar import ParallelPipeline, PlanError
from patchpar.pipeline.pipeline_call import progress_bars
from tests.tiny import build

from .conftest import EXACT, QUICK, generator, relative_error

CALL = {**QUICK, "output_type": "pt", "output": "images"}


def modular() -> Any:
    """A modular pipeline with the networks of a tiny SDXL, whose guider has guidance on."""
    pipe = with_parts_of("sdxl", StableDiffusionXLAutoBlocks())
    pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=5.0))
    return pipe


def with_parts_of(name: str, blocks: Any) -> Any:
    pipe = blocks.init_pipeline()
    found = build(name).pipe.components
    pipe.update_components(**{key: part for key, part in found.items() if part and key in pipe.component_names})
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


@pytest.mark.breadth
def test_transformers_are_split_on_every_axis() -> None:
    call = {
        "prompt": "a small red house",
        "num_inference_steps": 4,
        "height": 64,
        "width": 64,
        "max_sequence_length": 16,
    }
    call |= {"output_type": "pt", "output": "images"}
    pipe = with_parts_of("flux", FluxAutoBlocks())
    want = (torch.as_tensor(pipe(**call, generator=generator())),)
    with ParallelPipeline(pipe, devices="cpu:2", plan="patch=2") as split:
        for plan in ("patch=2", "tensor=2", "stage=2", "patch=2,weights=sharded"):
            split.plan = plan
            assert relative_error((torch.as_tensor(split(**call, generator=generator())),), want) <= EXACT
        split.plan = "patch=2,strategy=fresh-edges"
        off = relative_error((torch.as_tensor(split(**call, generator=generator())),), want)
        assert EXACT < off < 0.1


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
    with progress_bars(plain, disable=True):
        images(plain)
    assert capfd.readouterr().err == ""


def test_a_folder_of_one_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no diffusers model folder$"):
        ParallelPipeline.from_pretrained(tmp_path, devices="cpu:2")
    (tmp_path / "modular_model_index.json").write_text("{}")
    with pytest.raises(PlanError, match=r"load it with diffusers, and use ParallelPipeline\(pipe\)"):
        ParallelPipeline.from_pretrained(tmp_path, devices="cpu:2")
