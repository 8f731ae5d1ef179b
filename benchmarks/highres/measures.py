"""Whether a large image has seams, repeats itself, and shows at large what it shows at small.

Seam and repetition index are ours: a plain gradient hardly sees a step of 2/255, and the best match of two windows over
all shifts is high for any two windows. Images are (C, H, W) in 0..1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32  # pixels that a seam's step is averaged over
MARGIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """`value`, and `z`: how many standard errors it is away from what no seam or repetition would give."""

    value: float
    z: float


def seam_index(image_CHW: Tensor, rows: Sequence[int]) -> Index:
    """How much stronger the image steps at these rows than elsewhere; 1 is no stronger.

    A step is the difference of neighbouring rows less the mean of the differences before and after it, averaged over
    blocks of columns: what texture does has no sign that lasts, what a seam does has.
    """
    jump = image_CHW[:, 1:] - image_CHW[:, :-1]
    step = jump[:, 1:-1] - 0.5 * (jump[:, 2:] + jump[:, :-2])  # entry r is the step between rows r + 1 and r + 2
    blocks = step.unfold(-1, BLOCK, BLOCK).mean(-1).abs().mean((0, 2))
    at = torch.tensor([row - 2 for row in rows])
    positions = torch.arange(len(blocks))
    far = (positions[:, None] - at).abs().amin(1) > MARGIN
    off = blocks[far & (positions >= MARGIN) & (positions < len(blocks) - MARGIN)]
    mean = blocks[at].mean()
    return Index(value=float(mean / off.mean()), z=float((mean - off.mean()) / (off.std() / math.sqrt(len(rows)))))


def repetition_index(image_CHW: Tensor, window: tuple[int, int]) -> Index:
    """Mean correlation of all pairs of windows, each as it stands, 1.5 to 24 cycles; 0 is none, 1 all the same."""
    luma, (height, width) = image_CHW.mean(0), window
    rows, columns = (side // one for side, one in zip(luma.shape, window, strict=True))
    displayed = [
        _band(luma[row * height : (row + 1) * height, column * width : (column + 1) * width])
        for row in range(rows)
        for column in range(columns)
    ]
    flat = torch.stack([each.flatten() / each.norm().clamp_min(1e-9) for each in displayed])
    pairs = (flat @ flat.T)[torch.triu_indices(len(flat), len(flat), 1).unbind()]
    return Index(value=float(pairs.mean()), z=float(pairs.mean() / (pairs.std() / math.sqrt(len(pairs)))))


def _band(window_HW: Tensor) -> Tensor:
    cycles = torch.sqrt(
        (torch.fft.fftfreq(window_HW.shape[0]) * window_HW.shape[0])[:, None] ** 2
        + (torch.fft.fftfreq(window_HW.shape[1]) * window_HW.shape[1]) ** 2
    )
    return torch.fft.ifft2(torch.fft.fft2(window_HW) * ((cycles > 1.5) & (cycles < 24))).real


def agreement_db(large_CHW: Tensor, small_CHW: Tensor) -> float:
    """PSNR of a large image, made small by averages over areas, against a small one."""
    size = tuple(small_CHW.shape[-2:])
    error = (F.interpolate(large_CHW[None], size, mode="area")[0] - small_CHW).square().mean()
    return float(10 * torch.log10((small_CHW.max() - small_CHW.min()).square() / error.clamp_min(1e-12)))
