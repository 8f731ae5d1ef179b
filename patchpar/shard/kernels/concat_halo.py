"""A band with the rows beyond it, as a convolution reads them: one copy, which also normalises and activates the rows.

Shape letters: B batch, C channels, h rows of the band, r rows of a neighbour, W columns. A map is [B, C, h, W], or
[B, C, F, h, W] with frames; "rows" are slices along `dim`, so columns work alike.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.kernels.fused_op import SHAPES_KEPT, fused_op, is_fused
from patchpar.comm.kernels.program import Prepared, Program
from patchpar.shard.kernels.group_norm import scaled
from patchpar.shard.kernels.map_layout import empty_with_rows, is_channels_last, power_of_2

TILE = 2048  # values of a program


def halo_rows(rows: Tensor, terms: Tensor | None, silu: bool) -> Tensor:
    """Return a neighbour's raw rows [B, C, ..., r, W], normalised by `terms` [3, B * C] if given, and activated."""
    rows = rows if terms is None else scaled(rows, terms)
    return F.silu(rows) if silu else rows


def concat_halo_eager(
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    rows_before: int,
    rows_after: int,
    dim: int,
    terms: Tensor | None = None,
    silu: bool = False,
    first: int = 0,
    last: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` [B, C, ..., h, W] between `before` and `after` [B, C, ..., r, W], in the format of `x`.

    Where one of these is None there are zeros, `rows_before` or `rows_after` of them. With `terms` [3, B * C] they are
    raw, and normalised as the norm before `x` did, see `kernels.group_norm`; with `silu` activated too. Also contiguous
    copies of the `first` and of the `last` rows of `x`, to be sent.
    """
    pieces = [
        empty_with_rows(x, dim, count).zero_() if rows is None else halo_rows(rows, terms, silu)
        for rows, count in ((before, rows_before), (after, rows_after))
    ]
    pieces = [piece for piece in (pieces[0], x, pieces[1]) if piece.shape[dim]]
    if is_channels_last(x):
        joined = torch.cat([piece.movedim(1, -1) for piece in pieces], dim - 1).movedim(-1, 1)
    else:
        joined = torch.cat(pieces, dim)
    edges = (x.narrow(dim, 0, first), x.narrow(dim, x.shape[dim] - last, last))
    copies = [rows.clone(memory_format=torch.contiguous_format) for rows in edges]
    return joined, copies[0], copies[1]


_CONCAT_HALO = Program("patchpar.shard.kernels.programs.concat_halo", "concat_halo_program")


def launch_concat_halo(
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    rows_before: int,
    rows_after: int,
    dim: int,
    terms: Tensor | None = None,
    silu: bool = False,
    first: int = 0,
    last: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for `x` [B, C, ..., h, W], contiguous or channels_last, and contiguous rows beyond."""
    if first or last:
        found = empty_concat_halo(x, before, after, rows_before, rows_after, dim, None, silu, first, last)
    else:
        nothing = _no_rows(x.shape, x.dtype, x.device, dim)
        found = empty_with_rows(x, dim, rows_before + x.shape[dim] + rows_after), nothing, nothing
    facts = x.shape, is_channels_last(x), rows_before, rows_after, dim, silu, first, last
    _CONCAT_HALO.launch_by(_prepared, facts, (x, before, after, terms, *found))
    return found


def _prepared(
    shape: tuple[int, ...],
    channels_last: bool,
    rows_before: int,
    rows_after: int,
    dim: int,
    silu: bool,
    first: int,
    last: int,
) -> Prepared:
    """Return what a launch needs for a band of `shape`."""
    (batch, channels), rows = shape[:2], shape[dim]
    grid, runs, inner, runs_at_once, positions = _blocks_of(
        shape, rows_before + rows_after, dim, channels_last=channels_last
    )
    numbers = (
        runs,
        runs // (batch if channels_last else batch * channels),
        (rows_before + rows + rows_after) * inner,
        rows_before * inner,  # Triton makes what exceeds 32 bits 64 wide: a product in the kernel would overflow
        rows * inner,
        rows_after * inner,
        channels,
        batch * channels,
        first * inner,
        last * inner,
    )
    constants = {
        "CHANNELS_LAST": channels_last,
        "SILU": silu,
        "RUNS": runs_at_once,
        "POSITIONS": positions,
        "num_warps": 8,
    }
    return grid, numbers, constants


@lru_cache(maxsize=SHAPES_KEPT)
def _no_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, dim: int) -> Tensor:
    """Return a tensor with no rows of a map of this shape, and no memory."""
    rows = list(shape)
    rows[dim] = 0
    return torch.empty(rows, dtype=dtype, device=device)


def _blocks_of(
    shape: tuple[int, ...], more: int, dim: int, *, channels_last: bool
) -> tuple[tuple[int], int, int, int, int]:
    """Return the grid, runs of the band, values of a row in each, and runs and positions of a program.

    `more`: rows that are added to those of `shape`.
    """
    rows = shape[dim] + more
    order, at = ((shape[0], *shape[2:], shape[1]), dim - 1) if channels_last else (shape, dim)
    runs, inner = math.prod(order[:at]), math.prod(order[at + 1 :]) if at + 1 else 1
    length = rows * inner
    positions = min(power_of_2(length), TILE)
    runs_at_once = min(power_of_2(runs), TILE // positions)
    return (-(-runs // runs_at_once) * -(-length // positions),), runs, inner, runs_at_once, positions


def empty_concat_halo(
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    rows_before: int,
    rows_after: int,
    dim: int,
    terms: Tensor | None = None,
    silu: bool = False,
    first: int = 0,
    last: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty maps for `x` [B, C, ..., h, W] and the rows beyond, and for copies of its edge rows."""

    def edge(rows: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = rows
        return x.new_empty(shape)

    return empty_with_rows(x, dim, rows_before + x.shape[dim] + rows_after), edge(first), edge(last)


concat_halo = fused_op(
    "concat_halo(Tensor x, Tensor? before, Tensor? after, int rows_before, int rows_after, int dim, "
    "Tensor? terms=None, bool silu=False, int first=0, int last=0) -> (Tensor, Tensor, Tensor)",
    eager=concat_halo_eager,
    launch=launch_concat_halo,
    fake=empty_concat_halo,
)


def ready_rows(
    before: Tensor | None, after: Tensor | None, dim: int, terms: Tensor, *, silu: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the neighbours' raw rows [B, C, ..., r, W] normalised by `terms` [3, B * C] and activated: one launch."""
    there = [rows for rows in (before, after) if rows is not None]
    if not there or not is_fused(there[0]):
        found = (None if rows is None else halo_rows(rows, terms, silu) for rows in (before, after))
        return next(found), next(found)
    first, last = (None if rows is None else rows.contiguous() for rows in (before, after))
    counts = [0 if rows is None else rows.shape[dim] for rows in (first, last)]
    joined = concat_halo(there[0].narrow(dim, 0, 0), first, last, counts[0], counts[1], dim, terms, silu)[0]
    return (
        None if first is None else joined.narrow(dim, 0, counts[0]),
        None if last is None else joined.narrow(dim, counts[0], counts[1]),
    )
