"""What fits with matrices read of this rank's fresh keys and values, and of the stale ones that others hold.

    held      what others hold of each token, before the fit; centred
    missing   what has to come of it, beyond the line through the last two steps; centred

A matrix for each head takes `held` nearest to `missing`. As in `fit_tokens`, of which these fits are the other kind.
Shape letters: l own tokens, X = 2, B (keys and values; batch), N heads, D head width.
"""

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op
from patchpar.comm.kernels.program import Program
from patchpar.shard.kernels.fit_tokens import LEAST, LEAST_BEFOREHAND, MOST, RIDGE, TINY, held_by_others, make_last
from patchpar.shard.kernels.map_layout import power_of_2

TILE = 2048  # numbers that a program reads at once


def center_tokens_eager(
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    along: Tensor | None,
    ratio: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what a fit of tokens `own` [l, X, N, D] reads, and make these the last ones.

    `held` and `missing` of each head in one tensor [X, N, l, 2 D] in fp32, and numbers [X, N, 2 + 2 D]: the fraction of
    the line, the ridge, a shift without that by the matrix, and the mean of what is held. All else as in
    `fit_tokens_eager`, with samples of all tokens.
    """
    now_mean = own.mean(0, dtype=torch.float32)
    held = held_by_others(own, mean, tokens, mean_before, tokens_before, along, ratio)
    line = held.along.unsqueeze(-1)
    ridge = RIDGE * held.few.square().sum((0, -1)).div(own.shape[-1]).unsqueeze(-1) + TINY
    shift = now_mean - mean - line * held.way_mean
    numbers = torch.cat([line, ridge, shift, held.mean], -1)
    make_last(own, now_mean, mean, tokens, mean_before, tokens_before)
    return torch.cat([held.few, held.few_missing], -1).movedim(0, -2).contiguous(), numbers


_CENTER_TOKENS = Program("patchpar.shard.kernels.programs.fit_matrices", "center_tokens_program")


def launch_center_tokens(
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    along: Tensor | None,
    ratio: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `own` [l, X, N, D]: a program for each head of keys or values of a sample. See the twin."""
    pairs, numbers = empty_pairs(own)
    width = own.shape[-1]
    columns = power_of_2(width)
    _CENTER_TOKENS.launch(
        (mean.numel() // width,),
        (
            own,
            mean,
            tokens,
            mean if mean_before is None else mean_before,
            tokens if tokens_before is None else tokens_before,
            mean if along is None else along,
            ratio,
            pairs,
            numbers,
        ),
        (own.shape[0], own.stride(0)),
        RIDGE=RIDGE,
        LEAST=LEAST if along is None else LEAST_BEFOREHAND,
        MOST=MOST,
        TINY=TINY,
        WIDTH=width,
        COLUMNS=columns,
        ROWS=max(1, TILE // columns),
        EXTRAPOLATES=tokens_before is not None,
        BEFOREHAND=along is not None,
        num_warps=8,
    )
    return pairs, numbers


def empty_pairs(own: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return empty tensors for what a fit of tokens `own` [l, X, N, D] reads."""
    heads, (tokens, width) = own.shape[1:-1], (own.shape[0], own.shape[-1])
    pairs = own.new_empty((*heads, tokens, 2 * width), dtype=torch.float32)
    return pairs, own.new_empty((*heads, 2 + 2 * width), dtype=torch.float32)


center_tokens = fused_op(
    "center_tokens(Tensor own, Tensor(a!) mean, Tensor(b!) tokens, Tensor(c!)? mean_before, Tensor(d!)? tokens_before, "
    "Tensor(e!)? along, Tensor ratio) -> (Tensor, Tensor)",
    eager=center_tokens_eager,
    launch=launch_center_tokens,
    fake=empty_pairs,
)
