"""Tokens as a grid: ranges of rows, averages over windows, and the bias that makes an average count as many.

Shape letters: B batch, l tokens, N heads, D head width, r rows along the split, a tokens across it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.patches import Bands
from patchpar.selection import Piece


class Grid(NamedTuple):
    """The tokens of one level: rows of every place along `dim` (-2 rows, -1 columns of the picture), tokens across."""

    bands: Bands
    across: int
    dim: int

    def rows(self, place: int) -> int:
        """Rows of one place."""
        return self.bands.size(place)

    def start(self, place: int) -> int:
        """The first token of one place; tokens of bands of columns do not lie together."""
        return self.bands.starts[place] * self.across

    def num_tokens(self, place: int) -> int:
        """Tokens of one place."""
        return self.rows(place) * self.across


def take(x_BlND: Tensor, pieces: Sequence[Piece], grid: Grid) -> Tensor:
    """The pieces of a place's tokens, one after the other: [B, tokens of the pieces, N, D]."""
    rows = x_BlND.shape[1] // grid.across
    if tuple(pieces) == (Piece(0, rows),):
        return x_BlND
    x_BraND = _as_grid(x_BlND, rows, grid)
    return torch.cat([_averaged(x_BraND[:, piece.start : piece.stop], piece.pool) for piece in pieces], dim=1)


def _as_grid(x_BlND: Tensor, rows: int, grid: Grid) -> Tensor:
    if grid.dim == -2:
        return x_BlND.reshape(x_BlND.shape[0], rows, grid.across, *x_BlND.shape[2:])
    return x_BlND.reshape(x_BlND.shape[0], grid.across, rows, *x_BlND.shape[2:]).transpose(1, 2)


def _averaged(x_BraND: Tensor, pool: int) -> Tensor:
    if pool == 1:
        return x_BraND.flatten(1, 2)
    heads = x_BraND.shape[3:]
    x_BCra = x_BraND.flatten(3).permute(0, 3, 1, 2)
    pooled = F.avg_pool2d(x_BCra, pool, ceil_mode=True, count_include_pad=False)
    return pooled.flatten(2).transpose(1, 2).reshape(x_BraND.shape[0], -1, *heads)


def log_weights(pieces: Sequence[Piece], across: int) -> Tensor:
    """What to add to the logit of each token so that it counts as many as it stands for: log of that number, fp32."""
    return torch.tensor([float(weight) for piece in pieces for weight in piece.weights(across)]).log()
