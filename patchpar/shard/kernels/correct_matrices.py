"""Stale keys and values of the last two steps, extrapolated and corrected by a matrix for each head.

    attended = newest + along * ratio * (newest - previous) + newest @ matrix + shift

As `correct_tokens`, of which this is the other kind. Shape letters: T tokens of a buffer, l of one rank, R ranks in a
row with equally many, P all ranks, X = 2, B (keys and values; batch), N heads, D head width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op, nothing
from patchpar.comm.kernels.program import Program
from patchpar.shard.kernels.correct_tokens import most_tokens, runs_of
from patchpar.shard.kernels.map_layout import power_of_2
from patchpar.shard.precision import wide

ROWS = 32  # tokens that a program corrects
LEAST_COLUMNS = 16  # of a product of matrices in Triton


def correct_by_matrices(into: Tensor, newest: Tensor, previous: Tensor | None, fit: Tensor, ratio: Tensor) -> None:
    """Write tokens of some ranks to `into` [R, l, X, N, D]; `fit` [R, X, N, 1 + D D + D].

    `newest` and `previous` are as large as `into`; `previous` does not change. Sums in fp32.
    """
    width = newest.shape[-1]
    along, matrix, shift = fit.split_with_sizes((1, width * width, width), -1)
    moved = (newest.movedim(1, -2) @ torch.unflatten(matrix, -1, (width, width))).movedim(-2, 1)
    moved = wide(moved) + wide(shift).unsqueeze(1)
    if previous is not None:
        moved = torch.addcmul(moved, wide(newest) - wide(previous), wide(along).unsqueeze(1) * ratio)
    into.copy_(moved.add_(newest))


def correct_matrices_eager(
    attended: Tensor,
    newest: Tensor,
    previous: Tensor | None,
    fits: Tensor,
    ratio: Tensor,
    table: Tensor,
    runs: Sequence[int],
) -> None:
    """Write the other ranks' tokens to `attended` [T, X, N, D], and make the newest ones the previous ones.

    `fits` [P, X, N, 1 + D D + D] of all ranks; all else as in `correct_tokens_eager`.
    """
    for run in runs_of(runs):
        into, last = run.of(attended, run.attended), run.of(newest, run.newest)
        before = None if previous is None else run.of(previous, run.previous)
        correct_by_matrices(into, last, before, fits[run.first : run.first + run.ranks], ratio)
        if before is not None:
            before.copy_(last)


_CORRECT_MATRICES = Program("patchpar.shard.kernels.programs.correct_matrices", "correct_matrices_program")


def launch_correct_matrices(
    attended: Tensor,
    newest: Tensor,
    previous: Tensor | None,
    fits: Tensor,
    ratio: Tensor,
    table: Tensor,
    runs: Sequence[int],
) -> None:
    """Launch the kernel for `attended` [T, X, N, D]: a program for a few tokens of each rank and head. See the twin."""
    width = newest.shape[-1]
    heads = math.prod(newest.shape[1:-1])
    _CORRECT_MATRICES.launch(
        (-(-most_tokens(tuple(runs)) // ROWS), heads, table.shape[0]),
        (attended, newest, newest if previous is None else previous, fits, ratio, table),
        (),
        WIDTH=width,
        COLUMNS=max(LEAST_COLUMNS, power_of_2(width)),
        ROWS=ROWS,
        EXTRAPOLATES=previous is not None,
    )


correct_matrices = fused_op(
    "correct_matrices(Tensor(a!) attended, Tensor newest, Tensor(b!)? previous, Tensor fits, Tensor ratio, "
    "Tensor table, int[] runs) -> ()",
    eager=correct_matrices_eager,
    launch=launch_correct_matrices,
    fake=nothing,
)
