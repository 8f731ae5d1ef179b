"""Keys and values of the last two steps, extrapolated along the straight line through both.

    into = newest + along * ratio * (newest - previous)

Shape letters: l tokens, X = 2, B (keys and values; batch), N heads, D head width.
"""

import math

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op, nothing
from patchpar.comm.kernels.program import Program
from patchpar.shard.kernels.map_layout import power_of_2
from patchpar.shard.precision import wide

TILE = 4096  # numbers that a program extrapolates


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


_EXTRAPOLATE_TOKENS = Program("patchpar.shard.kernels.programs.extrapolate_tokens", "extrapolate_tokens_program")


def launch_extrapolate_tokens(
    into: Tensor, newest: Tensor, previous: Tensor, along: Tensor | None, ratio: Tensor
) -> None:
    """Launch the kernel for `newest` [l, X, N, D]: a program for a few tokens of each head. See the twin."""
    width, tokens = newest.shape[-1], newest.shape[0]
    columns = power_of_2(width)
    rows = max(1, TILE // columns)
    _EXTRAPOLATE_TOKENS.launch(
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
    launch=launch_extrapolate_tokens,
    fake=nothing,
)
