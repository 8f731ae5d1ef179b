"""Tokens as a grid: ranges of rows, averages over windows, and the logit bias that weights an average.

Shape letters: l tokens, p planes, r rows, c columns of each, C numbers of one token.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.plan.bands import Bands
from patchpar.plan.kv_selection import PooledRows, TokensAcross
from patchpar.shard.kernels.pack_tokens import Window


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
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return _sizes_of(self.bands.starts, self.across)

    @property
    def has_whole_rows(self) -> bool:
        """Whether the tokens of a row along the split follow each other."""
        return self.dim == -2 and (self.across.planes == 1 or self.across.rows is not None)

    @property
    def total_tokens(self) -> int:
        """Tokens of all ranks."""
        return self.bands.total * self.across.num_tokens


@lru_cache(maxsize=1024)  # every attention layer asks, in every call
def _sizes_of(starts: tuple[int, ...], across: TokensAcross) -> tuple[int, ...]:
    """Return the tokens of each rank, whose bands begin there."""
    tokens = across.num_tokens
    return tuple((stop - start) * tokens for start, stop in pairwise(starts))


def take(x: Tensor, pieces: Sequence[PooledRows], grid: LevelGrid) -> Tensor:
    """Return the pieces of a rank's tokens [l, ...], concatenated: [tokens of the pieces, ...].

    All rows unchanged are `x` itself; a single piece of rows that follow each other in memory is a view of it.
    """
    rows = x.shape[0] // grid.across.num_tokens
    if tuple(pieces) == (PooledRows(0, rows),):
        return x
    if len(pieces) == 1 and pieces[0].pool == 1 and grid.has_whole_rows:
        tokens = grid.across.num_tokens
        return x.narrow(0, pieces[0].start * tokens, (pieces[0].stop - pieces[0].start) * tokens)
    x_prcC = _as_grid(x.reshape(x.shape[0], -1), rows, grid)
    taken = [_averaged(_rows_of(x_prcC, piece, grid), piece.pool) for piece in pieces]
    return (taken[0] if len(taken) == 1 else torch.cat(taken)).view(-1, *x.shape[1:])


@lru_cache(maxsize=1024)  # attention layers of one level ask for the same
def windows_of(pieces: tuple[PooledRows, ...], grid: LevelGrid, group_rank: int) -> tuple[Window, ...]:
    """Return the windows over a rank's tokens whose averages are the tokens that `take` returns of the pieces."""
    across, rows = grid.across, grid.rows(group_rank)
    if pieces == (PooledRows(0, rows),):
        return tuple(Window(token, 1, 1, 0, 0) for token in range(grid.num_tokens(group_rank)))
    found = list[Window]()
    for piece in pieces:
        planes, high, wide = across.volume(piece.stop - piece.start)
        if grid.dim == -1:
            plane_step, row_step, column_step = 0, 1, rows
        else:
            plane_step, row_step, column_step = wide * (rows if across.rows is None else high), wide, 1
        start = piece.start * (plane_step if across.rows is not None else row_step)
        for plane, row, column in product(range(planes), range(0, high, piece.pool), range(0, wide, piece.pool)):
            first = start + plane * plane_step + row * row_step + column * column_step
            found.append(
                Window(first, min(piece.pool, high - row), min(piece.pool, wide - column), row_step, column_step)
            )
    return tuple(found)


def take_bias(bias: Tensor, pieces: Sequence[PooledRows], grid: LevelGrid) -> Tensor:
    """Return the logit bias of the pieces of a rank's tokens, [..., tokens of the pieces], from that of all, [..., l].

    The bias of an average is the log of the sum of its tokens' weights, so that masked tokens do not count.
    """
    rows = bias.shape[-1] // grid.across.num_tokens
    if tuple(pieces) == (PooledRows(0, rows),):
        return bias
    bias_prcC = _as_grid(bias.reshape(-1, bias.shape[-1]).t(), rows, grid)
    found = torch.cat([_log_summed(_rows_of(bias_prcC, piece, grid), piece.pool) for piece in pieces])
    return found.t().reshape(*bias.shape[:-1], -1)


def _as_grid(x_lC: Tensor, rows: int, grid: LevelGrid) -> Tensor:
    if grid.dim == -2:
        return torch.unflatten(x_lC, 0, grid.across.volume(rows))
    return torch.unflatten(x_lC, 0, (grid.across.columns, rows)).transpose(0, 1).unsqueeze(0)


def _rows_of(x_prcC: Tensor, piece: PooledRows, grid: LevelGrid) -> Tensor:
    """Return the rows of the piece along the split dim."""
    dim = 1 if grid.across.rows is None else 0
    return x_prcC.narrow(dim, piece.start, piece.stop - piece.start)


def _averaged(x_prcC: Tensor, pool: int) -> Tensor:
    if pool == 1:
        return x_prcC.flatten(0, 2)
    maps_pCrc = x_prcC.permute(0, 3, 1, 2)  # in torch's format channels_last
    return _as_tokens(F.avg_pool2d(maps_pCrc, pool, ceil_mode=True, count_include_pad=False))


def _log_summed(bias_prcC: Tensor, pool: int) -> Tensor:
    if pool == 1:
        return bias_prcC.flatten(0, 2)
    highest_C = bias_prcC.amax((0, 1, 2)).nan_to_num(neginf=0.0)
    factors_pCrc = (bias_prcC - highest_C).exp().permute(0, 3, 1, 2)
    summed = _as_tokens(F.avg_pool2d(factors_pCrc, pool, ceil_mode=True, divisor_override=1))
    return summed.log() + highest_C


def _as_tokens(maps_pCrc: Tensor) -> Tensor:
    """Return pooled maps as tokens [l, C]."""
    return maps_pCrc.permute(0, 2, 3, 1).flatten(0, 2)


def log_weights(pieces: Sequence[PooledRows], across: TokensAcross) -> Tensor:
    """Return the logit bias [tokens of the pieces] in fp32: the log of the number of tokens that each represents."""
    return torch.tensor([float(weight) for piece in pieces for weight in piece.weights(across)]).log()
