"""Anchored latents: what the four latent channels mean is defined, not learnt.

A latent cell stands for 4x4 pixels. Channels 0-2 are twice the mean colour of the cell, channel 3 is eight times the
standard deviation of its luma, minus one half. So training images need no encoder, the decoder is a 4x upsampler
with one hint about detail, and the first three channels of any latent, halved, are a small image.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from training.render import RenderedImage

CELL = 4
"""Pixels per latent cell and side."""


def to_tensor(pixels: np.ndarray) -> Tensor:
    """Pixels (H, W, 3) uint8 to an image (1, 3, H, W) in -1..1."""
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].float() / 127.5 - 1


def to_latent(image_BCHW: Tensor) -> Tensor:
    """Images (B, 3, H, W) in -1..1 to latents (B, 4, H/4, W/4)."""
    luma = image_BCHW.mean(1, keepdim=True)
    variance = functional.avg_pool2d(luma * luma, CELL) - functional.avg_pool2d(luma, CELL) ** 2
    detail = 8 * variance.clamp_min(0).sqrt() - 0.5
    return torch.cat([2 * functional.avg_pool2d(image_BCHW, CELL), detail], 1)


def object_mask(displayed: RenderedImage) -> Tensor:
    """Which cells (1, H/4, W/4) show an object or its reflection, with a cell of margin: 1 inside, 0 outside."""
    height, width = (side // CELL for side in displayed.pixels.shape[:2])
    mask = torch.zeros(1, height, width)
    for box in displayed.boxes:
        left, top, right, bottom = (round(side / CELL) for side in box)
        mask[:, max(0, top - 1) : max(0, bottom + 1), max(0, left - 1) : max(0, right + 1)] = 1
    return mask
