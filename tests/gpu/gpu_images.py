"""Images of whole pipelines on GPUs, as a user calls them, and how far they are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from patchpar import ParallelPipeline

PROMPT, STEPS, SIZE = "a red house on the left, green hills at noon", 6, 256
PLANS = ("cfg=2", "patch=2", "patch=2,weights=sharded", "patch=2,weights=hosted", "stage=2", "tensor=2")
"""The last one is for transformers."""
APPROXIMATE = ("patch=2,strategy=displaced", "patch=2,strategy=pcpp", "patch=2,strategy=fresh-edges")
EXACT_PSNR, OTHER_PSNR = 55.0, 25.0
"""dB of images from 0 to 1. GPUs round convolutions in fp32 to TF32, and a band may be convolved by another kernel."""


def image(pipe: ParallelPipeline, plan: str = "", seed: int = 0) -> Tensor:
    if plan:
        pipe.plan = plan
    generator = torch.Generator().manual_seed(seed)
    given = {"num_inference_steps": STEPS, "height": SIZE, "width": SIZE, "output_type": "pt", "generator": generator}
    return pipe(PROMPT, **given).images[0].float().cpu()


def psnr(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert a.isfinite().all(), "a NaN is passed over by `min` wherever it does not come first"
    return float(-10 * torch.log10((a.double() - b.double()).square().mean() + 1e-12))
