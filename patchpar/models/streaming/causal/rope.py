"""Wan's rotary position embedding for frames at any time: negative, beyond diffusers' table, in any order.

A stream has no end, so that positions exceed every table; they are computed from the same frequencies instead.
Attention depends on differences of positions only, so that the sink frame can keep its distance to the current block
(Live Avatar, arXiv:2512.04677, section 4.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor

from patchpar.shard.host_memory import to_device

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchGrid:
    """Patches of one frame: rows and columns of tokens."""

    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class RotaryPositions:
    """Wan's cosines and sines for tokens of `grid`. `widths`: channels of a head rotated by time, row and column.

    `grid_positions`: those of the grid's rows and columns, by default 0, 1, 2 and so on.
    """

    def __init__(
        self,
        widths: tuple[int, int, int],
        grid: PatchGrid,
        device: torch.device,
        grid_positions: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        self.grid, self.device = grid, device
        self._time_width = widths[0]
        grid_positions = grid_positions or (range(grid.rows), range(grid.columns))
        rows, columns = (_table(width, at) for width, at in zip(widths[1:], grid_positions, strict=True))
        self._space = tuple(
            torch.cat([row.repeat_interleave(grid.columns, 0), column.repeat(grid.rows, 1)], 1)
            for row, column in zip(rows, columns, strict=True)
        )

    def at(self, frames: Sequence[int]) -> Rotary:
        """Return (cos, sin), each [1, tokens, 1, d], of frames at these times, which may be negative. d: head width."""
        times = _table(self._time_width, frames)
        cos, sin = (
            torch.cat([time.repeat_interleave(self.grid.tokens, 0), space.repeat(len(frames), 1)], 1)
            for time, space in zip(times, self._space, strict=True)
        )
        return to_device(cos[None, :, None], self.device), to_device(sin[None, :, None], self.device)


def _table(width: int, positions: Sequence[int]) -> Rotary:
    """(cos, sin) [positions, width] in double precision: single would be too coarse after an hour of a stream."""
    at = torch.tensor(list(positions), dtype=torch.float64)
    cos, sin = get_1d_rotary_pos_embed(width, at, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64)
    return cos, sin


def rotate(x_BLhd: Tensor, rotary: Rotary) -> Tensor:
    """Rotate pairs of channels [B, L, heads, d] by their positions, with the arithmetic of Wan's own attention."""
    cos, sin = rotary
    even, odd = x_BLhd[..., 0::2], x_BLhd[..., 1::2]
    out = torch.empty_like(x_BLhd)
    out[..., 0::2] = even * cos[..., 0::2] - odd * sin[..., 1::2]
    out[..., 1::2] = even * sin[..., 1::2] + odd * cos[..., 0::2]
    return out
