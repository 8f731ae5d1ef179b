"""Tokens as a grid: ranges of rows, averages over windows, and the logit bias that weights an average.

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
    """The tokens of one level: rows of every rank along `dim` (-2 rows, -1 columns of the image), and across it.

    `start` counts tokens in the order of ranks, where each rank's tokens are contiguous.
    """

    bands: Bands
    across: TokensAcross
    dim: int

    def rows(self, group_rank: int) -> int:
        """Rows of one rank."""
        return self.bands.size(group_rank)

    def start(self, group_rank: int) -> int:
        """Index of the first token of one rank, in the order of ranks."""
        return self.bands.starts[group_rank] * self.across.num_tokens

    def num_tokens(self, group_rank: int) -> int:
        """Tokens of one rank."""
        return self.rows(group_rank) * self.across.num_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of all ranks."""
        return self.bands.total * self.across.num_tokens


def take(x_BlND: Tensor, pieces: Sequence[PooledRows], grid: LevelGrid) -> Tensor:
    """Return the pieces of a rank's tokens [B, l, N, D], concatenated: [B, tokens of the pieces, N, D]."""
    rows = x_BlND.shape[1] // grid.across.num_tokens
    if tuple(pieces) == (PooledRows(0, rows),):
        return x_BlND
    x_BprcND = _as_grid(x_BlND, rows, grid)
    return torch.cat([_averaged(_rows_of(x_BprcND, piece, grid), piece.pool) for piece in pieces], dim=1)


def take_bias(bias: Tensor, pieces: Sequence[PooledRows], grid: LevelGrid) -> Tensor:
    """Return the logit bias of the pieces of a rank's tokens, [..., tokens of the pieces], from that of all, [..., l].

    The bias of an average is the log of the sum of its tokens' weights, so that masked tokens do not count.
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
    """Return the rows of the piece along the split dim."""
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
    """Return each plane as a feature map, [B p, N D, r, c]."""
    return x_BprcND.flatten(4).flatten(0, 1).permute(0, 3, 1, 2)


def _as_tokens(maps: Tensor, like_BprcND: Tensor) -> Tensor:
    """Invert `_as_maps` for pooled maps: [B, l, N, D]."""
    tokens = maps.flatten(2).transpose(1, 2)
    return tokens.reshape(like_BprcND.shape[0], -1, *like_BprcND.shape[4:])


def log_weights(pieces: Sequence[PooledRows], across: TokensAcross) -> Tensor:
    """Return the logit bias [tokens of the pieces] in fp32: the log of the number of tokens that each represents."""
    return torch.tensor([float(weight) for piece in pieces for weight in piece.weights(across)]).log()
