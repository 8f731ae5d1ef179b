"""Tokens of earlier frames, the coarser the older: 1 latent frame in patches, 2 in larger ones, 16 in the largest.

FramePack (arXiv:2504.12626, section 3.1) with the kernels and positions of Wan-S2V's checkpoint (arXiv:2508.18621):

    frames -1          -3, -2           -19 ... -4          before the video
    patches 1 x 2 x 2  2 x 4 x 4        4 x 8 x 8
    at times -1        -3               -19, -14, -9, -4

Coarse patches are at rows and columns of the fine grid, evenly spread over all of it.

Shapes: B batch, C latent channels, F latent frames, H x W latent pixels, L tokens, D width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from patchpar.errors import PlanError

KERNELS = ((1, 2, 2), (2, 4, 4), (4, 8, 8))
FRAMES = (1, 2, 16)
"""Latent frames of each kernel, the newest first."""
NUM_FRAMES = sum(FRAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGrid:
    """Tokens at all combinations of these positions in time, rows and columns, in that order."""

    times: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Their number."""
        return len(self.times) * len(self.rows) * len(self.columns)


def packed_grids(height: int, width: int) -> tuple[PackedGrid, ...]:
    """Return where the tokens of latents of `height` x `width` are, in the order of `FramePacker`. Raises PlanError."""
    largest = KERNELS[-1][1]
    if min(height, width) < largest:
        raise PlanError(f"latents of {height} x {width}: this model packs patches of {largest} x {largest} of them")
    grids, oldest = [], 0
    for (frames, rows, columns), count in zip(KERNELS, FRAMES, strict=True):
        oldest += count
        times = _spread(count, count // frames, first=oldest, step=-1)
        grids.append(
            PackedGrid(
                times=tuple(-time for time in times),
                rows=_spread(height // KERNELS[0][1], height // rows),
                columns=_spread(width // KERNELS[0][2], width // columns),
            )
        )
    return tuple(grids)


def _spread(extent: int, count: int, *, first: int = 0, step: int = 1) -> tuple[int, ...]:
    """`count` whole positions evenly over `extent` ones from `first` on, both ends included."""
    return tuple(int(at) for at in np.linspace(first, first + step * (extent - 1), count))


class FramePacker(nn.Module):
    """Convolutions from latents to tokens, one per kernel."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.proj, self.proj_2x, self.proj_4x = (
            nn.Conv3d(channels, dim, kernel_size=kernel, stride=kernel) for kernel in KERNELS
        )

    def forward(self, latents_BCFHW: Tensor) -> Tensor:
        """Return tokens [B, L, D] of the last 19 latent frames; missing ones are zero."""
        last = latents_BCFHW[:, :, -NUM_FRAMES:]
        last = functional.pad(last, (0, 0, 0, 0, NUM_FRAMES - last.shape[2], 0))
        parts = reversed(torch.split(last, list(FRAMES[::-1]), 2))
        packed = (conv(part) for conv, part in zip((self.proj, self.proj_2x, self.proj_4x), parts, strict=True))
        return torch.cat([tokens.flatten(2).transpose(1, 2) for tokens in packed], 1)
