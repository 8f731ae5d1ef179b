"""Tokens as a grid: ranges of rows, averages over windows, and the bias that makes an average count as many.

Shape letters: B batch, l tokens, N heads, D head width, p planes, r rows, c columns of each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.plan.bands import Bands
from patchpar.plan.kv_selection import PooledRows, TokensAcross


class LevelGrid(NamedTuple):
    """The tokens of one level: rows of every place along `dim` (-2 rows, -1 columns of the picture), and across it.

    A place's tokens follow each other, all of the place before it first, as far as `start` is concerned.
    """

    bands: Bands
    across: TokensAcross
    dim: int

    def rows(self, group_rank: int) -> int:
        """Rows of one place."""
        return self.bands.size(group_rank)

    def start(self, group_rank: int) -> int:
        """The first token of one place, where each place's tokens lie together."""
        return self.bands.starts[group_rank] * self.across.num_tokens

    def num_tokens(self, group_rank: int) -> int:
        """Tokens of one place."""
        return self.rows(group_rank) * self.across.num_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of all places."""
        return self.bands.total * self.across.num_tokens


def take(x_BlND: Tensor, pieces: Sequence[PooledRows], grid: LevelGrid) -> Tensor:
    """The pieces of a place's tokens, one after the other: [B, tokens of the pieces, N, D]."""
    rows = x_BlND.shape[1] // grid.across.num_tokens
    if tuple(pieces) == (PooledRows(0, rows),):
        return x_BlND
    x_BprcND = _as_grid(x_BlND, rows, grid)
    return torch.cat([_averaged(_rows_of(x_BprcND, piece, grid), piece.pool) for piece in pieces], dim=1)


def take_bias(bias: Tensor, pieces: Sequence[PooledRows], grid: LevelGrid) -> Tensor:
    """What is added to the logits of a place's tokens [..., l], for the pieces of them.

    For an average the log of the sum of what its tokens are multiplied by, so that it counts as many as are not hidden.
    """
    bias_Bl11 = bias.reshape(-1, bias.shape[-1], 1, 1)
    rows = bias.shape[-1] // grid.across.num_tokens
    if tuple(pieces) == (PooledRows(0, rows),):
        return bias
    bias_Bprc11 = _as_grid(bias_Bl11, rows, grid)
    found = [_log_summed(_rows_of(bias_Bprc11, piece, grid), piece.pool) for piece in pieces]
    return torch.cat(found, dim=1).reshape(*bias.shape[:-1], -1)


def _as_grid(x_BlND: Tensor, rows: int, grid: LevelGrid) -> Tensor:
    if grid.dim == -2:
        return torch.unflatten(x_BlND, 1, grid.across.volume(rows))
    return torch.unflatten(x_BlND, 1, (grid.across.columns, rows)).transpose(1, 2).unsqueeze(1)


def _rows_of(x_BprcND: Tensor, piece: PooledRows, grid: LevelGrid) -> Tensor:
    """The piece's rows along the split."""
    dim = 2 if grid.across.rows is None else 1
    return x_BprcND.narrow(dim, piece.start, piece.stop - piece.start)


def _averaged(x_BprcND: Tensor, pool: int) -> Tensor:
    if pool == 1:
        return x_BprcND.flatten(1, 3)
    pooled = F.avg_pool2d(_as_maps(x_BprcND), pool, ceil_mode=True, count_include_pad=False)
    return _as_tokens(pooled, x_BprcND)


def _log_summed(bias_Bprc11: Tensor, pool: int) -> Tensor:
    if pool == 1:
        return bias_Bprc11.flatten(1)
    highest = bias_Bprc11.amax((1, 2, 3), keepdim=True).nan_to_num(neginf=0.0)
    factors = _as_maps((bias_Bprc11 - highest).exp())
    summed = _as_tokens(F.avg_pool2d(factors, pool, ceil_mode=True, divisor_override=1), bias_Bprc11)
    return summed.flatten(1).log() + highest.flatten(1)


def _as_maps(x_BprcND: Tensor) -> Tensor:
    """Each plane as a map of channels, [B p, N D, r, c]."""
    return x_BprcND.flatten(4).flatten(0, 1).permute(0, 3, 1, 2)


def _as_tokens(maps: Tensor, like_BprcND: Tensor) -> Tensor:
    """The other way round, [B, l, N, D], with windows for rows and columns."""
    tokens = maps.flatten(2).transpose(1, 2)
    return tokens.reshape(like_BprcND.shape[0], -1, *like_BprcND.shape[4:])


def log_weights(pieces: Sequence[PooledRows], across: TokensAcross) -> Tensor:
    """What to add to the logit of each token so that it counts as many as it stands for: log of that number, fp32."""
    return torch.tensor([float(weight) for piece in pieces for weight in piece.weights(across)]).log()
