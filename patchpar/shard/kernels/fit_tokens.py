"""The fit of this rank's fresh keys and values to the stale ones that others hold, as the message for the others.

Shape letters: l own tokens, s sampled ones, X = 2, B (keys and values; batch), N heads, D head width. The message is
[X, N, 1 + 2 D]: for each head which fraction of the line was right, a scale and a shift of each channel.
"""

import torch
from torch import Tensor

from patchpar.shard.kernels.fused_op import fused_op
from patchpar.shard.kernels.map_layout import power_of_2

RIDGE = 1e-3  # of the mean square of the channels: bounds a fit to few or to equal tokens
LEAST, MOST = 0.5, 1.0  # fraction of the line: measured, see docs/decisions/0017
TILE = 2048  # numbers that a program reads at once
TINY = torch.finfo(torch.float32).tiny


def fit_tokens_eager(
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    ratio: Tensor,
    stride: int,
    message: Tensor | None = None,
) -> Tensor:
    """Return the fit [X, N, 1 + 2 D] of tokens `own` [l, X, N, D], and make samples of these the last ones.

    `mean` [X, N, D] in fp32 and `tokens` [s, X, N, D], every `stride`-th, are of the step before; `mean_before` and
    `tokens_before`, of the one before that, become them, where others extrapolate. `message` [l, X, N, D] gets all of
    `own`, if it is given; `tokens` may be every `stride`-th of it. `ratio`: length of this step over that of the last,
    a scalar in fp32. Ridge regression in fp32: first the fraction of the line, then the rest. Means
    are taken over all tokens, since an error in them is common to all and attention does not average it away; scales
    are less sensitive.
    """
    now_mean, now_tokens = own.mean(0, dtype=torch.float32), own[::stride]
    now, old = now_tokens.float(), tokens.float()
    few_old, few_missing = _centred(old), _centred(now - old)
    if tokens_before is None or mean_before is None:
        way_mean, along = torch.zeros_like(mean), mean.new_full(mean.shape[:-1], LEAST)
    else:
        few_way = _centred((old - tokens_before.float()) * ratio)
        way_mean = (mean - mean_before) * ratio
        square = few_way.square().mean((0, -1)) + TINY
        along = ((few_way * few_missing).mean((0, -1)) / square).clamp(LEAST, MOST).to(own.dtype).float()
        few_missing = torch.addcmul(few_missing, along.unsqueeze(-1), few_way, value=-1)
        tokens_before.copy_(tokens)
        mean_before.copy_(mean)
    square = few_old.square().mean(0)
    pull = RIDGE * square.mean(-1, keepdim=True) + TINY
    scale = (few_old * few_missing).mean(0) / (square + pull)
    shift = now_mean - mean - along.unsqueeze(-1) * way_mean - mean * scale
    tokens.copy_(now_tokens)
    mean.copy_(now_mean)
    if message is not None:
        message.copy_(own)
    return torch.cat([along.unsqueeze(-1), scale, shift], -1).to(own.dtype)


def _centred(x_sXND: Tensor) -> Tensor:
    return x_sXND - x_sXND.mean(0, keepdim=True)


def launch_fit_tokens(
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    ratio: Tensor,
    stride: int,
    message: Tensor | None = None,
) -> Tensor:
    """Launch the kernel for `own` [l, X, N, D]: a program for each head of keys or values of a sample. See the twin."""
    from patchpar.shard.kernels.programs.fit_tokens import fit_tokens_program

    packed, width = empty_fit(own), own.shape[-1]
    columns = power_of_2(width)
    fit_tokens_program[(mean.numel() // width,)](
        own,
        mean,
        tokens,
        mean if mean_before is None else mean_before,
        tokens if tokens_before is None else tokens_before,
        ratio,
        packed,
        own if message is None else message,
        own.shape[0],
        tokens.shape[0],
        stride,
        own.stride(0),
        tokens.stride(0),
        RIDGE=RIDGE,
        LEAST=LEAST,
        MOST=MOST,
        TINY=TINY,
        WIDTH=width,
        COLUMNS=columns,
        ROWS=max(1, TILE // columns),
        EXTRAPOLATES=tokens_before is not None,
        COPIES=message is not None,
        num_warps=8,
    )
    return packed


def empty_fit(own: Tensor, *_: object) -> Tensor:
    """Return an empty tensor for the fit [X, N, 1 + 2 D] of tokens `own` [l, X, N, D]."""
    return own.new_empty((*own.shape[1:-1], 1 + 2 * own.shape[-1]))


fit_tokens = fused_op(
    "fit_tokens(Tensor own, Tensor(a!) mean, Tensor(b!) tokens, Tensor(c!)? mean_before, Tensor(d!)? tokens_before, "
    "Tensor ratio, int stride, Tensor(e!)? message=None) -> Tensor",
    eager=fit_tokens_eager,
    launch=launch_fit_tokens,
    fake=empty_fit,
)
