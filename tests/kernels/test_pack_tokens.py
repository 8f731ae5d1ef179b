"""Averages and differences of tokens as messages, by one kernel: the bits of the twin, which are those of `take`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from patchpar.plan.bands import Bands
from patchpar.plan.kv_selection import PooledRows, TokensAcross
from patchpar.shard.kernels.pack_tokens import (
    UNIT,
    WindowRun,
    launch_pack_tokens,
    pack_tokens_eager,
    run_numbers,
)
from patchpar.shard.kernels.quantize_delta import quantize_delta
from patchpar.shard.stale.token_grid import LevelGrid, take, windows_of
from tests.breadth import first_of

GRIDS = {
    "rows": LevelGrid(Bands((0, 4, 9, 14)), TokensAcross(7), -2),
    "columns": LevelGrid(Bands((0, 4, 9, 14)), TokensAcross(7), -1),
    "rows of frames": LevelGrid(Bands((0, 4, 9, 14)), TokensAcross(3, planes=3), -2),
    "frames": LevelGrid(Bands((0, 2, 5, 7)), TokensAcross(3, rows=5), -2),
}
MINE = 1  # with five rows, or three frames
HALF = torch.float16
DTYPES = (torch.float32, HALF, torch.bfloat16)


class Messages(NamedTuple):
    """Pieces of tokens, and how many ranks get them."""

    pieces: tuple[PooledRows, ...]
    receivers: int = 1


def messages_of(grid: LevelGrid) -> list[Messages]:
    """To a neighbour its nearest row and averages of the others, to two far ranks averages, to one all as they are."""
    rows = grid.rows(MINE)
    return [
        Messages((PooledRows(rows - 1, rows), PooledRows(0, rows - 1, 2))),
        Messages((PooledRows(0, rows, 3),), receivers=2),
        Messages((PooledRows(0, rows),)),
    ]


def tokens_of(grid: LevelGrid, dtype: torch.dtype, width: int) -> Tensor:
    return torch.randn(grid.num_tokens(MINE), 2, 2, 3, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def sizes_of(count: int, width: int, dtype: torch.dtype, bits: int) -> list[int]:
    """Units of the tensors of a message with so many heads."""
    if bits == 16:
        return [-(-count * width * dtype.itemsize // UNIT)]
    return [-(-count * (width if bits == 8 else -(-width // 2)) // UNIT), -(-count * 2 // UNIT)]


def packed(
    pack: Callable[..., None],
    grid: LevelGrid,
    messages: Sequence[Messages],
    own: Tensor,
    copy: Tensor | None,
    bits: int,
) -> tuple[Tensor, Tensor | None]:
    """The buffer of all messages, with a unit of nobody between tensors, and the copy of their tokens."""
    windows, runs, end = [], [], 0
    for pieces, receivers in messages:
        found, offsets = windows_of(pieces, grid, MINE), list[tuple[int, int]]()
        heads = len(found) * own[0].numel() // own.shape[-1]
        for _ in range(receivers):
            starts = []
            for size in sizes_of(heads, own.shape[-1], own.dtype, bits):
                starts.append(end)
                end += size + 1
            offsets.append((starts[0], starts[-1]))
        runs.append(WindowRun(len(windows), len(found), tuple(offsets)))
        windows += found
    buffer, numbers = torch.full((end * UNIT,), 7, dtype=torch.uint8), run_numbers(runs)
    table = torch.tensor(numbers, dtype=torch.int32).view(len(runs), -1)
    pool = max(max(window.rows, window.columns) for window in windows)
    pack(buffer, own, copy, torch.tensor(windows, dtype=torch.int32), table, numbers, pool, bits)
    return buffer, copy


def as_taken(
    grid: LevelGrid, messages: Sequence[Messages], own: Tensor, copy: Tensor | None, bits: int
) -> tuple[Tensor, Tensor | None]:
    """The same, piece by piece."""
    found, start = list[Tensor](), 0
    for pieces, receivers in messages:
        x = take(own, pieces, grid)
        parts: Sequence[Tensor] = (x,)
        if copy is not None:
            parts = quantize_delta(copy.narrow(0, start, x.shape[0]), x, bits)
            start += x.shape[0]
        for part in [*parts] * receivers:
            values = part.contiguous().view(-1).view(torch.uint8)
            size = (-(-values.shape[0] // UNIT) + 1) * UNIT
            found.append(torch.cat([values, values.new_full((size - values.shape[0],), 7)]))
    return torch.cat(found), copy


def copies_of(grid: LevelGrid, messages: Sequence[Messages], own: Tensor) -> Tensor:
    """What the receivers have: tokens that have changed since, one of them by nothing and one by much."""
    found = torch.cat([take(own, pieces, grid) for pieces, _ in messages])
    changed = (found + 0.1 * torch.randn(found.shape, generator=torch.Generator().manual_seed(1))).to(own.dtype)
    changed[0], changed[1] = found[0], -6e4
    return changed


@pytest.mark.parametrize("name", first_of([*GRIDS], "rows"))
@pytest.mark.parametrize("dtype", first_of(DTYPES, HALF))
def test_averages_are_those_of_the_pieces(interpreted: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    grid = GRIDS[name]
    messages, own = messages_of(grid), tokens_of(grid, dtype, 7)
    wanted, _ = as_taken(grid, messages, own, None, 16)
    twin, _ = packed(pack_tokens_eager, grid, messages, own, None, 16)
    found, _ = interpreted(packed, launch_pack_tokens, grid, messages, own, None, 16)
    assert torch.equal(twin, wanted)
    if dtype == torch.bfloat16:  # which the interpreter does not round as GPUs do, but cuts
        assert (values_of(found, dtype) - values_of(wanted, dtype)).abs().max() <= 2.0**-6
    else:
        assert torch.equal(found, wanted)


def values_of(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    return buffer.view(dtype).float().clamp(-8, 8)


@pytest.mark.parametrize("name", first_of([*GRIDS], "rows"))
@pytest.mark.parametrize(
    ("bits", "dtype", "width"),
    first_of(
        [(bits, dtype, width) for bits in (8, 4) for dtype in (torch.float32, HALF) for width in (7, 64)],
        (8, torch.float32, 64),
        (4, HALF, 7),
    ),
)
def test_differences_are_those_of_the_pieces_and_the_copy_gets_them(
    interpreted: Callable[..., Any], name: str, bits: int, dtype: torch.dtype, width: int
) -> None:
    grid = GRIDS[name]
    messages, own = messages_of(grid), tokens_of(grid, dtype, width)
    copy = copies_of(grid, messages, own)
    wanted = as_taken(grid, messages, own, copy.clone(), bits)
    twin = packed(pack_tokens_eager, grid, messages, own, copy.clone(), bits)
    found = interpreted(packed, launch_pack_tokens, grid, messages, own, copy.clone(), bits)
    for each in (twin, found):
        assert torch.equal(each[0], wanted[0])
        assert torch.equal(each[1].view(torch.uint8), wanted[1].view(torch.uint8))
    assert not torch.equal(wanted[1], copy)


def test_another_token_would_be_seen(interpreted: Callable[..., Any]) -> None:
    """Control: of one number of a window in a corner."""
    grid = GRIDS["rows"]
    messages, own = messages_of(grid), tokens_of(grid, torch.float32, 7)
    wanted, _ = as_taken(grid, messages, own, None, 16)
    own[-1, 1, 1, 2, 6] += 1e-3
    assert not torch.equal(interpreted(packed, launch_pack_tokens, grid, messages, own, None, 16)[0], wanted)


def test_windows_of_one_token_are_copied_as_they_are(interpreted: Callable[..., Any]) -> None:
    """Where none has more, nothing is divided: also what a sum would lose."""
    grid = GRIDS["columns"]
    messages, own = [Messages((PooledRows(1, 4),))], tokens_of(grid, torch.float32, 7)
    own[5, 0] = torch.inf
    wanted, _ = as_taken(grid, messages, own, None, 16)
    for found in (
        packed(pack_tokens_eager, grid, messages, own, None, 16),
        interpreted(packed, launch_pack_tokens, grid, messages, own, None, 16),
    ):
        assert torch.equal(found[0], wanted)
