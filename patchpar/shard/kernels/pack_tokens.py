"""Keys and values of tokens as messages: as they are, averaged over windows, or quantised, written where they are sent.

All messages of an exchange point by one launch. A window has `rows` x `columns` tokens of a grid, and a message is a
run of windows: their averages, or the levels and scales of the difference of these to a copy, which becomes what the
receiver has then. See `kernels.quantize_delta`.

Shape letters: l tokens, K windows, D head width. Tokens are [..., D], with D numbers of one head in a row.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import SHAPES_KEPT, fused_op, nothing
from patchpar.comm.kernels.program import Compiled, Program
from patchpar.comm.kernels.repeated_op import RepeatedOp, without_result
from patchpar.shard.kernels.map_layout import power_of_2
from patchpar.shard.kernels.quantize_delta import most_of, quantize_delta
from patchpar.shard.precision import wide

TILE = 4096  # numbers that a program reads of each token of its windows
UNIT = 16  # bytes: messages, and tensors of several dtypes in them, begin at multiples


class Window(NamedTuple):
    """Tokens that are averaged: the `first` of `rows` x `columns`, and how far neighbours are from one another."""

    first: int
    rows: int
    columns: int
    row_step: int
    column_step: int


class WindowRun(NamedTuple):
    """Windows that follow each other, and where what becomes of them goes in the buffer, once for each receiver.

    `offsets`: first units of the values, or of levels and of scales.
    """

    first: int
    length: int
    offsets: tuple[tuple[int, int], ...]


def run_numbers(runs: Sequence[WindowRun]) -> list[int]:
    """Return the runs as rows of numbers, all as long, one after the other: `pack_tokens` takes no other."""
    most, found = max(len(run.offsets) for run in runs), list[int]()
    for run in runs:
        offsets = [*run.offsets, *[(0, 0)] * (most - len(run.offsets))]
        found += (run.first, run.length, len(run.offsets), *(number for offset in offsets for number in offset))
    return found


def pack_tokens_eager(
    buffer: Tensor,
    own: Tensor,
    copy: Tensor | None,
    windows: Tensor,
    table: Tensor,
    runs: Sequence[int],
    pool: int,
    bits: int,
) -> None:
    """Write messages to `buffer` [bytes]: averages of tokens `own` [l, ..., D] over `windows` [K, 5], see `Window`.

    With a `copy` [K, ..., D] of what the receivers have, quantised differences to it with so many `bits`, which are
    added to it. `runs`: see `run_numbers`; `table` [runs, numbers] has the same. `pool`: most rows or columns of a
    window.
    """
    for first, count, offsets in _runs_of(runs, table.shape[1]):
        x = _averages(own, windows.narrow(0, first, count), pool)
        parts = (x,) if copy is None else quantize_delta(copy.narrow(0, first, count), x, bits)
        for offset in offsets:
            for part, unit in zip(parts, offset, strict=False):
                values = part.view(-1).view(torch.uint8)
                buffer.narrow(0, unit * UNIT, values.shape[0]).copy_(values)


def _runs_of(runs: Sequence[int], length: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield first window, number of windows, and offsets of each run."""
    for start in range(0, len(runs), length):
        first, count, receivers, *offsets = runs[start : start + length]
        yield first, count, list(zip(offsets[::2], offsets[1::2], strict=True))[:receivers]


def _averages(own: Tensor, windows: Tensor, pool: int) -> Tensor:
    """Return the averages [K, ..., D] of tokens [l, ..., D] over `windows` [K, 5]."""
    first, rows, columns, row_step, column_step = windows.long().unbind(1)
    if pool == 1:
        return own[first]
    each = (-1, *[1] * (own.ndim - 1))
    total = torch.zeros_like(wide(own[:1]))
    for row, column in product(range(pool), repeat=2):
        inside = (row < rows) & (column < columns)
        token = torch.where(inside, first + row * row_step + column * column_step, first)
        total = total + torch.where(inside.view(each), wide(own[token]), 0.0)
    return (total / (rows * columns).view(each)).to(own.dtype)


_AVERAGE_TOKENS = Program("patchpar.shard.kernels.programs.pack_tokens", "average_tokens_program")
_QUANTIZE_TOKENS = Program("patchpar.shard.kernels.programs.pack_tokens", "quantize_tokens_program")


def launch_pack_tokens(
    buffer: Tensor,
    own: Tensor,
    copy: Tensor | None,
    windows: Tensor,
    table: Tensor,
    runs: Sequence[int],
    pool: int,
    bits: int,
) -> Compiled | None:
    """Launch the kernel: a program for a few windows of each run and head. All tensors are contiguous. See the twin."""
    width, length = own.shape[-1], table.shape[1]
    grid, rows = _grid_of(tuple(runs), length, math.prod(own.shape[1:-1]), width)
    if copy is None:
        return _AVERAGE_TOKENS.launch(
            grid,
            (buffer, own, windows, table),
            (length,),
            POOL=pool,
            WIDTH=width,
            COLUMNS=power_of_2(width),
            ROWS=rows,
        )
    return _QUANTIZE_TOKENS.launch(
        grid,
        (buffer, own, copy, windows, table),
        (length,),
        POOL=pool,
        MOST=most_of(bits),
        IS_BYTE=bits == 8,
        WIDTH=width,
        PAIRS=power_of_2(-(-width // 2)),
        ROWS=rows,
    )


@lru_cache(maxsize=SHAPES_KEPT)
def _grid_of(runs: tuple[int, ...], length: int, heads: int, width: int) -> tuple[tuple[int, int, int], int]:
    """Return the grid of the program, and its windows."""
    rows = max(1, TILE // power_of_2(max(2, width)))
    return (-(-max(runs[1::length]) // rows), heads, len(runs) // length), rows


pack_tokens = fused_op(
    "pack_tokens(Tensor(a!) buffer, Tensor own, Tensor(b!)? copy, Tensor windows, Tensor table, int[] runs, int pool, "
    "int bits) -> ()",
    eager=pack_tokens_eager,
    launch=without_result(launch_pack_tokens),
    fake=nothing,
)


def repeated_packing() -> RepeatedOp:
    """Return `pack_tokens` for one exchange point."""
    return RepeatedOp(pack_tokens, launch_pack_tokens)
