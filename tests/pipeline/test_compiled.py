"""Networks that torch compiles: refused in words before anything is sent, whenever and however they were compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline, UnsupportedModel
from tests.tiny import build

from .conftest import EXACT, QUICK, generator, relative_error

CALL = {**QUICK, "output_type": "latent"}
WHOLE = "is compiled as a whole.*compile its blocks"


def _wrapped(pipe: Any) -> None:
    pipe.unet = torch.compile(pipe.unet, backend="eager")


def _in_place(pipe: Any) -> None:
    pipe.unet.compile(backend="eager")


def _wrapped_transformer(pipe: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


def _compiled_transformer(pipe: Any) -> None:
    pipe.transformer.compile(backend="eager")


def _block(pipe: Any) -> None:
    pipe.unet.mid_block = torch.compile(pipe.unet.mid_block, backend="eager")


def _text_encoder(pipe: Any) -> None:
    pipe.text_encoder.compile(backend="eager")


BEFORE: list[tuple[str, Callable[[Any], None], str]] = [
    ("sdxl", _wrapped, f"UNet2DConditionModel {WHOLE}.*_orig_mod|_orig_mod.*compile its blocks"),
    ("sdxl", _in_place, f"UNet2DConditionModel {WHOLE}"),
    ("flux", _wrapped_transformer, r"FluxTransformer2DModel is compiled as a whole.*_orig_mod.*compile its blocks"),
    ("flux", _compiled_transformer, f"FluxTransformer2DModel {WHOLE}"),
    ("sdxl", _block, r"pipe\.unet\.mid_block is compiled.*cannot be sent.*pipe\.unet\.compile_repeated_blocks"),
    ("sdxl", _text_encoder, r"pipe\.text_encoder is compiled.*cannot be sent"),
]


@pytest.mark.parametrize(("name", "compiled", "words"), BEFORE)
def test_compiled_before(name: str, compiled: Callable[[Any], None], words: str) -> None:
    pipe = build(name).pipe
    compiled(pipe)
    with pytest.raises(UnsupportedModel, match=words):
        ParallelPipeline(pipe, devices="cpu:2", plan="patch=2")


@pytest.mark.parametrize("plan", ["patch=2", "cfg=2"])
def test_compiled_after(parallel: ParallelPipeline, plain: Any, plan: str) -> None:
    parallel.plan = plan
    with pytest.raises(UnsupportedModel, match=WHOLE):
        parallel.unet = torch.compile(build("sdxl").pipe.unet, backend="eager")
    want = plain(**CALL, generator=generator())
    assert relative_error(parallel(**CALL, generator=generator()), want) <= EXACT  # nothing was set


@pytest.mark.breadth
def test_one_device_takes_what_is_compiled(plain: Any) -> None:
    pipe = build("sdxl").pipe
    want = plain(**CALL, generator=generator())
    _in_place(pipe)
    with ParallelPipeline(pipe, devices="cpu:1") as alone:
        assert relative_error(alone(**CALL, generator=generator()), want) <= EXACT
