"""Stale keys and values of the last two steps, extrapolated along the line through both, and corrected.

    those of all other ranks, written to what attention reads
        attended = newest + along * ratio * (newest - previous) + scale * newest + shift
    those of this rank, before it sends them
        into = newest + along * ratio * (newest - previous)

Shape letters: T tokens of a buffer, l of one rank, R ranks in a row with equally many, P all ranks, X = 2, B (keys and
values; batch), N heads, D head width. Buffers are [T, X, N, D], in the order of ranks.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import SHAPES_KEPT, fused_op, nothing
from patchpar.comm.kernels.program import Compiled, Program
from patchpar.comm.kernels.repeated_op import RepeatedOp, without_result
from patchpar.shard.kernels.map_layout import power_of_2
from patchpar.shard.precision import wide

TILE = 4096  # numbers that a program corrects or extrapolates


class RunOfRanks(NamedTuple):
    """Consecutive ranks with `tokens` each, handled together.

    `first`: group rank of the first one. `attended`, `newest`, `previous`: its first token in these buffers.
    """

    first: int
    ranks: int
    tokens: int
    attended: int
    newest: int
    previous: int

    def of(self, buffer: Tensor, start: int) -> Tensor:
        """Return the tokens [R, l, ...] of these ranks, a view of the buffer [T, ...] where they begin at `start`."""
        return buffer.narrow(0, start, self.ranks * self.tokens).view(self.ranks, self.tokens, *buffer.shape[1:])


def runs_of(flat: Sequence[int]) -> Iterator[RunOfRanks]:
    """Yield the runs of a flat list of their fields: an operator takes no other."""
    size = len(RunOfRanks._fields)
    for start in range(0, len(flat), size):
        yield RunOfRanks(*flat[start : start + size])


def table_of(runs: Sequence[RunOfRanks]) -> Tensor:
    """Return a row for each rank in the runs [ranks, 5]: its group rank, tokens, first token in each buffer."""
    rows = [
        (run.first + index, run.tokens, *(start + index * run.tokens for start in run[3:]))
        for run in runs
        for index in range(run.ranks)
    ]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 5)


def correct_tokens_eager(
    attended: Tensor,
    newest: Tensor,
    previous: Tensor | None,
    fits: Tensor | None,
    ratio: Tensor,
    table: Tensor,
    runs: Sequence[int],
) -> None:
    """Write the other ranks' tokens to `attended` [T, X, N, D], and make the newest ones the previous ones.

    `newest` and `previous` [T, X, N, D] are of the last two steps; without `previous` nothing is extrapolated. `fits`
    [P, X, N, 1 + 2 D] of all ranks, as `fit_tokens` returns them; without them nothing is corrected. `ratio`: length of
    this step over that of the last, a scalar in fp32. `table` and `runs`: see `table_of` and `runs_of`. Sums in fp32.
    """
    for run in runs_of(runs):
        into, last = run.of(attended, run.attended), run.of(newest, run.newest)
        before = None if previous is None else run.of(previous, run.previous)
        fit = None if fits is None else fits[run.first : run.first + run.ranks]
        correct_run(into, last, before, fit, ratio)
        if before is not None:
            before.copy_(last)


def correct_run(into: Tensor, newest: Tensor, previous: Tensor | None, fit: Tensor | None, ratio: Tensor) -> None:
    """Write tokens of some ranks to `into` [R, l, X, N, D]: `newest` and `previous` are as large, `fit` of each rank.

    As `correct_tokens_eager`, but `fit` is [R, X, N, 1 + 2 D] in any dtype, and `previous` does not change.
    """
    if fit is None:
        if previous is None:
            into.copy_(newest)
        else:
            torch.lerp(previous, newest, (1 + ratio).to(newest.dtype), out=into)
        return
    width, fit = newest.shape[-1], wide(fit).unsqueeze(1)
    along, scale, shift = fit.split_with_sizes((1, width, width), -1)
    gain, out = 1 + scale, into if into.dtype == fit.dtype else None
    if previous is not None:
        reach = along * ratio
        gain += reach
        shift = torch.addcmul(shift, previous, reach, value=-1, out=out)
    moved = torch.addcmul(shift, newest, gain, out=out)
    if out is None:
        into.copy_(moved)


_CORRECT_TOKENS = Program("patchpar.shard.kernels.programs.correct_tokens", "correct_tokens_program")


def launch_correct_tokens(
    attended: Tensor,
    newest: Tensor,
    previous: Tensor | None,
    fits: Tensor | None,
    ratio: Tensor,
    table: Tensor,
    runs: Sequence[int],
) -> Compiled | None:
    """Launch the kernel for `attended` [T, X, N, D]: a program for a few tokens of each rank and head. See the twin."""
    width = newest.shape[-1]
    columns = power_of_2(width)
    rows = max(1, TILE // columns)
    heads = math.prod(newest.shape[1:-1])
    return _CORRECT_TOKENS.launch(
        (-(-most_tokens(tuple(runs)) // rows), heads, table.shape[0]),
        (attended, newest, newest if previous is None else previous, newest if fits is None else fits, ratio, table),
        (),
        WIDTH=width,
        COLUMNS=columns,
        ROWS=rows,
        EXTRAPOLATES=previous is not None,
        CORRECTS=fits is not None,
    )


@lru_cache(maxsize=SHAPES_KEPT)
def most_tokens(runs: tuple[int, ...]) -> int:
    """Return the largest number of tokens of a rank."""
    return max((run.tokens for run in runs_of(runs)), default=0)


correct_tokens = fused_op(
    "correct_tokens(Tensor(a!) attended, Tensor newest, Tensor(b!)? previous, Tensor? fits, Tensor ratio, "
    "Tensor table, int[] runs) -> ()",
    eager=correct_tokens_eager,
    launch=without_result(launch_correct_tokens),
    fake=nothing,
)


def repeated_correction() -> RepeatedOp:
    """Return `correct_tokens` for one exchange point."""
    return RepeatedOp(correct_tokens, launch_correct_tokens)


def extrapolate_tokens_eager(
    into: Tensor, newest: Tensor, previous: Tensor, along: Tensor | None, ratio: Tensor
) -> None:
    """Write tokens to `into` [l, X, N, D], extrapolated from `newest` and `previous` [l, X, N, D].

    `along` [X, N]: a fraction of the line for each head; None is all of it. `ratio`: length of this step over that of
    the last. Both in fp32.
    """
    if along is None:
        torch.lerp(previous, newest, (1 + ratio).to(newest.dtype), out=into)
    else:
        into.copy_(torch.addcmul(wide(newest), wide(newest) - wide(previous), along.unsqueeze(-1) * ratio))


_EXTRAPOLATE_TOKENS = Program("patchpar.shard.kernels.programs.correct_tokens", "extrapolate_tokens_program")


def launch_extrapolate_tokens(
    into: Tensor, newest: Tensor, previous: Tensor, along: Tensor | None, ratio: Tensor
) -> Compiled | None:
    """Launch the kernel for `newest` [l, X, N, D]: a program for a few tokens of each head. See the twin."""
    width, tokens = newest.shape[-1], newest.shape[0]
    columns = power_of_2(width)
    rows = max(1, TILE // columns)
    return _EXTRAPOLATE_TOKENS.launch(
        (-(-tokens // rows), math.prod(newest.shape[1:-1])),
        (into, newest, previous, ratio if along is None else along, ratio),
        (tokens,),
        WIDTH=width,
        COLUMNS=columns,
        ROWS=rows,
        HAS_ALONG=along is not None,
    )


extrapolate_tokens = fused_op(
    "extrapolate_tokens(Tensor(a!) into, Tensor newest, Tensor previous, Tensor? along, Tensor ratio) -> ()",
    eager=extrapolate_tokens_eager,
    launch=without_result(launch_extrapolate_tokens),
    fake=nothing,
)


def repeated_extrapolation() -> RepeatedOp:
    """Return `extrapolate_tokens` for one exchange point."""
    return RepeatedOp(extrapolate_tokens, launch_extrapolate_tokens)
