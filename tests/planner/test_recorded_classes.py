"""Calls of every pipeline class of diffusers are recorded, or refused in words for the reason that is here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from benchmarks.coverage.pipelines.zoo import ZOO
from patchpar.errors import UnsupportedModel
from patchpar.pipeline.planner.record import Recording
from patchpar.plan.plan import Plan
from patchpar.plan.replay.tape import Operator, steps_of
from tests.breadth import first_of

GRADIENTS = "takes gradients within a call, of which a loss is a value"
FLEX_ATTENTION = "calls FlexAttention, which torch refuses without a device; its mask is code"
REFUSED = {
    "AnyFlowFARPipeline": (FLEX_ATTENTION, "AnyFlowFARPipeline needs values.* FlexAttention"),
    "Kandinsky6SRPipeline": (FLEX_ATTENTION, "Kandinsky6SRPipeline needs values.* FlexAttention"),
    "StableDiffusionAttendAndExcitePipeline": (GRADIENTS, "AttendAndExcitePipeline needs values.* gradient"),
    "StableDiffusionPix2PixZeroPipeline": (GRADIENTS, "Pix2PixZeroPipeline needs values.* gradient"),
}
"""The reason, and what the refusal says."""
NO_DENOISER = {"FluxPriorReduxPipeline": "takes no seed, so that no call through the package is possible"}
SEEDED = ("VisualClozePipeline", "VisualClozeGenerationPipeline")
"""Pipelines that fail without a generator, in diffusers too."""
OFTEN = ("HiDreamImagePipeline", "MochiPipeline", "KandinskyV22InpaintCombinedPipeline", "AnyFlowFARPipeline")


def recording(name: str) -> Recording:
    pipe, call = ZOO[name].make()
    seed: dict[str, Any] = {"generator": torch.Generator().manual_seed(0)} if name in SEEDED else {}
    return Recording(pipe, Plan(), {**call, **seed})


@pytest.mark.parametrize("name", first_of([name for name in ZOO if name not in NO_DENOISER], *OFTEN))
def test_a_call_is_recorded_or_refused_in_words(name: str) -> None:
    if name in REFUSED:
        _, words = REFUSED[name]
        with pytest.raises(UnsupportedModel, match=words):
            recording(name).of_rank(0)
        return
    found = steps_of(recording(name).of_rank(0).tape)
    first = [entry for entry in found["step 0"] if isinstance(entry, Operator)]
    assert sum(entry.flops for entry in first) > 0


def test_every_exception_is_a_class_with_a_reason() -> None:
    assert not {*REFUSED, *NO_DENOISER, *SEEDED} - {*ZOO}
    for reason in (*(why for why, _ in REFUSED.values()), *NO_DENOISER.values()):
        assert re.fullmatch(r"[a-z].{20,}", reason)


def test_a_pipeline_without_a_seed_is_refused_by_itself() -> None:
    for name in NO_DENOISER:
        with pytest.raises(TypeError, match="generator"):
            recording(name).of_rank(0)
