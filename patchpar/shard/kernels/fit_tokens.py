"""The fit of this rank's fresh keys and values to the stale ones that others hold, as the message for the others.

And what fits read of them in an exact step: their means, and every few tokens, or all.

    others extrapolate      newest + along * ratio * (newest - previous) + scale * newest + shift
    the owner does          held = newest + along * ratio * (newest - previous), then held + scale * held + shift
    nobody does             newest + scale * newest + shift

Where others extrapolate, `along` is of this step and part of the fit. An owner that extrapolates does so before it has
the tokens of this step: its `along` is that of the last step, and the fit is one of what it has sent.

Shape letters: l own tokens, s sampled ones, X = 2, B (keys and values; batch), N heads, D head width. The message is
[X, N, 1 + 2 D]: for each head the fraction of the line, a scale and a shift of each channel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op, nothing
from patchpar.comm.kernels.program import Compiled, Program
from patchpar.comm.kernels.repeated_op import RepeatedOp, without_result
from patchpar.shard.kernels.map_layout import power_of_2

RIDGE = 1e-3  # of the mean square of the channels: bounds a fit to few or to equal tokens
LEAST, MOST = 0.5, 1.0  # fraction of the line: measured, see docs/decisions/0017
LEAST_BEFOREHAND = 0.7  # of that of the last step, which is behind one that grows
TILE = 2048  # numbers that a program reads at once
TINY = torch.finfo(torch.float32).tiny


def fit_tokens_eager(
    into: Tensor,
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    along: Tensor | None,
    ratio: Tensor,
    stride: int,
) -> None:
    """Write the fit of tokens `own` [l, X, N, D] to `into` [X, N, 1 + 2 D]; make these, or samples, the last ones.

    `mean` [X, N, D] in fp32 and `tokens` [s, X, N, D], every `stride`-th, or all of them [l, X, N, D], are of the step
    before; `mean_before` and `tokens_before`, of the one before that, become them, where tokens are extrapolated: by
    their owner if `along` [X, N] in fp32 of the last step is given, which becomes that of this one. `ratio`: length of
    this step over that of the last, a scalar in fp32. Ridge regression in fp32: first the fraction of the line, then
    the rest. Means are taken over all tokens, since an error in them is common to all and attention does not average
    it away; scales are less sensitive.
    """
    now_mean, num_tokens = own.mean(0, dtype=torch.float32), own.shape[0]
    last = sampled(tokens, num_tokens, stride)
    before = None if tokens_before is None else sampled(tokens_before, num_tokens, stride)
    held = held_by_others(own[::stride], mean, last, mean_before, before, along, ratio)
    square = held.few.square().mean(0)
    pull = RIDGE * square.mean(-1, keepdim=True) + TINY
    scale = (held.few * held.few_missing).mean(0) / (square + pull)
    shift = now_mean - mean - held.along.unsqueeze(-1) * held.way_mean - held.mean * scale
    make_last(
        own if tokens.shape[0] == num_tokens else own[::stride], now_mean, mean, tokens, mean_before, tokens_before
    )
    into.copy_(torch.cat([held.along.unsqueeze(-1), scale, shift], -1))


class HeldTokens(NamedTuple):
    """What others hold of sampled tokens: what a fit multiplies, and what has to come of it.

    `few` and `few_missing` [s, X, N, D] are both, centred; `mean` [X, N, D] of the former. To what is missing, `along`
    [X, N] of the line has been added, whose mean is `way_mean` [X, N, D].
    """

    few: Tensor
    few_missing: Tensor
    mean: Tensor
    along: Tensor
    way_mean: Tensor


def held_by_others(
    now_tokens: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    along: Tensor | None,
    ratio: Tensor,
) -> HeldTokens:
    """Return what others hold of sampled tokens, which are now `now_tokens` [s, X, N, D]; see `fit_tokens_eager`.

    `tokens` and `tokens_before` [s, X, N, D] are samples. `along` [X, N] becomes the fraction of this step.
    """
    old = tokens.float()
    few_old, few_missing = _centred(old), _centred(now_tokens.float() - old)
    if tokens_before is None or mean_before is None:
        none = mean.new_full(mean.shape[:-1], LEAST)
        return HeldTokens(few_old, few_missing, mean, none, torch.zeros_like(mean))
    few_way = _centred((old - tokens_before.float()) * ratio)
    way_mean = (mean - mean_before) * ratio
    square = few_way.square().mean((0, -1)) + TINY
    least = LEAST if along is None else LEAST_BEFOREHAND
    found = ((few_way * few_missing).mean((0, -1)) / square).clamp(least, MOST).to(now_tokens.dtype).float()
    used = found if along is None else along.clone()
    line = used.unsqueeze(-1)
    few_missing = torch.addcmul(few_missing, line, few_way, value=-1)
    if along is None:
        return HeldTokens(few_old, few_missing, mean, used, way_mean)
    along.copy_(found)
    few_held, held_mean = torch.addcmul(few_old, line, few_way), torch.addcmul(mean, line, way_mean)
    return HeldTokens(few_held, few_missing, held_mean, used, way_mean)


def make_last(
    now_tokens: Tensor,
    now_mean: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
) -> None:
    """Make tokens [s, X, N, D] and their mean [X, N, D] the last ones, and the last ones those before, if kept."""
    if tokens_before is not None and mean_before is not None:
        tokens_before.copy_(tokens)
        mean_before.copy_(mean)
    tokens.copy_(now_tokens)
    mean.copy_(now_mean)


def sampled(tokens: Tensor, num_tokens: int, stride: int) -> Tensor:
    """Return the samples [s, X, N, D] that are stored, or are among all `num_tokens` tokens that are."""
    return tokens[::stride] if tokens.shape[0] == num_tokens else tokens


def _centred(x_sXND: Tensor) -> Tensor:
    return x_sXND - x_sXND.mean(0, keepdim=True)


_FIT_TOKENS = Program("patchpar.shard.kernels.programs.fit_tokens", "fit_tokens_program")


def launch_fit_tokens(
    into: Tensor,
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    along: Tensor | None,
    ratio: Tensor,
    stride: int,
) -> Compiled | None:
    """Launch the kernel: a program for each head of keys or values of a sample. See the twin."""
    width = own.shape[-1]
    columns = power_of_2(width)
    return _FIT_TOKENS.launch(
        (mean.numel() // width,),
        (
            own,
            mean,
            tokens,
            mean if mean_before is None else mean_before,
            tokens if tokens_before is None else tokens_before,
            mean if along is None else along,
            ratio,
            into,
        ),
        (own.shape[0], stride, own.stride(0)),
        RIDGE=RIDGE,
        LEAST=LEAST if along is None else LEAST_BEFOREHAND,
        MOST=MOST,
        TINY=TINY,
        WIDTH=width,
        COLUMNS=columns,
        ROWS=max(1, TILE // columns),
        EXTRAPOLATES=tokens_before is not None,
        BEFOREHAND=along is not None,
        KEEPS_ALL=tokens.shape[0] == own.shape[0],
        num_warps=8,
    )


def empty_fit(own: Tensor) -> Tensor:
    """Return an empty tensor for the fit [X, N, 1 + 2 D] of tokens `own` [l, X, N, D]."""
    return own.new_empty((*own.shape[1:-1], 1 + 2 * own.shape[-1]))


fit_tokens = fused_op(
    "fit_tokens(Tensor(f!) into, Tensor own, Tensor(a!) mean, Tensor(b!) tokens, Tensor(c!)? mean_before, "
    "Tensor(d!)? tokens_before, Tensor(e!)? along, Tensor ratio, int stride) -> ()",
    eager=fit_tokens_eager,
    launch=without_result(launch_fit_tokens),
    fake=nothing,
)


def repeated_fit() -> RepeatedOp:
    """Return `fit_tokens` for one exchange point."""
    return RepeatedOp(fit_tokens, launch_fit_tokens)


def sample_tokens_eager(
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    stride: int,
    continues: bool,
) -> None:
    """Make tokens `own` [l, X, N, D], or samples of them, the last ones, and the last ones those of the step before.

    `mean` [X, N, D] in fp32 and `tokens` [s, X, N, D], every `stride`-th, or all of them [l, X, N, D]; `mean_before`
    and `tokens_before` are alike. Unless it `continues`, nothing is known of the step before: it gets the new ones too,
    whatever was stored.
    """
    now_mean = own.mean(0, dtype=torch.float32)
    now_tokens = own if tokens.shape[0] == own.shape[0] else own[::stride]
    if mean_before is not None and tokens_before is not None:
        mean_before.copy_(mean if continues else now_mean)
        tokens_before.copy_(tokens if continues else now_tokens)
    mean.copy_(now_mean)
    tokens.copy_(now_tokens)


_SAMPLE_TOKENS = Program("patchpar.shard.kernels.programs.fit_tokens", "sample_tokens_program")


def launch_sample_tokens(
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    stride: int,
    continues: bool,
) -> None:
    """Launch the kernel for `own` [l, X, N, D]: a program for each head of keys or values of a sample. See the twin."""
    width = own.shape[-1]
    columns = power_of_2(width)
    _SAMPLE_TOKENS.launch(
        (mean.numel() // width,),
        (
            own,
            mean,
            tokens,
            mean if mean_before is None else mean_before,
            tokens if tokens_before is None else tokens_before,
        ),
        (own.shape[0], stride, own.stride(0)),
        WIDTH=width,
        COLUMNS=columns,
        ROWS=max(1, TILE // columns),
        HAS_BEFORE=tokens_before is not None,
        CONTINUES=continues,
        KEEPS_ALL=tokens.shape[0] == own.shape[0],
        num_warps=8,
    )


sample_tokens = fused_op(
    "sample_tokens(Tensor own, Tensor(a!) mean, Tensor(b!) tokens, Tensor(c!)? mean_before, Tensor(d!)? tokens_before, "
    "int stride, bool continues) -> ()",
    eager=sample_tokens_eager,
    launch=launch_sample_tokens,
    fake=nothing,
)
