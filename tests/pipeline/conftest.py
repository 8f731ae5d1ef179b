"""The pipeline of the pool without us, a pool of four for jobs, adapters, and ways to compare what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image

from patchpar import ParallelPipeline
from tests.pipeline.pool import Hold
from tests.tiny import build

__all__ = ["Hold"]

QUICK = {"prompt": "a small red house", "height": 128, "width": 128, "num_inference_steps": 2}
WORLD = 4
EXACT = 1e-5
"""Relative error of exact strategies in fp32."""


@pytest.fixture(scope="session")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters as files."""
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("ink", "snow")):
        pipe = build("sdxl").pipe
        torch.manual_seed(seed)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets))
        layers = get_peft_model_state_dict(pipe.unet)
        pipe.save_lora_weights(folder, unet_lora_layers=layers, weight_name=f"{name}.safetensors")
    return folder


@pytest.fixture(scope="session")
def plain(sdxl_folder: Path) -> Any:
    """The pipeline of `sdxl_folder`, without us."""
    pipe = DiffusionPipeline.from_pretrained(sdxl_folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def four(sdxl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelPipeline]:
    """A pool of four, for jobs. Tests kill workers of it."""
    verifications = tmp_path_factory.mktemp("verifications")
    with ParallelPipeline.from_pretrained(
        sdxl_folder, devices=f"cpu:{WORLD}", verify=verifications, deadline=10.0
    ) as pipe:
        pipe.set_progress_bar_config(disable=True)
        yield pipe


@pytest.fixture
def reloaded(parallel: ParallelPipeline, sdxl_folder: Path) -> Iterator[ParallelPipeline]:
    """The pool for a test that changes weights: an adapter fused and unfused again leaves a rounding in them."""
    yield parallel
    parallel._state.executor.call("load", str(sdxl_folder), {}, replay=True)  # and in workers that take their place


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor_of(output: Any) -> torch.Tensor:
    """Images, arrays or latents of an output as one tensor; images in 0 to 1."""
    first = output[0] if isinstance(output, tuple) else next(iter(output.values()))
    if isinstance(first, torch.Tensor):
        return first
    if isinstance(first, list):
        items = [tensor_of((item,)) if isinstance(item, list) else torch.tensor(_array(item)) for item in first]
        return torch.stack(items)
    return torch.tensor(first)


def _array(image: Any) -> Any:
    return np.asarray(image, dtype=np.float32) / 255 if isinstance(image, Image.Image) else np.asarray(image)


def relative_error(got: Any, want: Any) -> float:
    """Norm of the difference over the norm of `want`, which must be of the same class and shape."""
    assert type(got) is type(want)
    x, y = tensor_of(got), tensor_of(want)
    assert x.shape == y.shape
    assert x.dtype == y.dtype
    return ((x - y).norm() / y.norm()).item()
