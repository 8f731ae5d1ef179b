"""What one place computes from its own rows and the others' rows as it has them. Pure functions.

Shape letters: B batch, C channels, G groups, N heads, D head width, R rows and S columns of the whole map, L = R * S
tokens, k keys. `dim` is the split dim of a map [..., R, S]: -2 for bands of rows, -1 for bands of columns. "Rows" below
means slices along it. `starts[i]:starts[i + 1]` are the rows of place i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.emulation.policy import EmulatedPolicy
from patchpar.plan.bands import Bands

Span = tuple[int, int]
Conv = nn.Conv2d | nn.Conv3d
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a latent of R x S is shared between places, on maps of every level."""

    bands: Bands
    size: tuple[int, int]
    dim: int

    def spans(self, rows: int) -> list[Span]:
        """Rows of every place on a map with `rows` of them: a level of a UNet halves, rounding up."""
        stride = self._stride(lambda stride: -(-self.bands.total // stride) == rows, f"{rows} rows")
        starts = [-(-start // stride) for start in self.bands.starts]
        return list(pairwise(starts))

    def grid(self, tokens: int) -> tuple[int, int]:
        """Rows and columns of the level that has this many tokens."""
        rows, columns = self.size
        stride = self._stride(lambda stride: -(-rows // stride) * -(-columns // stride) == tokens, f"{tokens} tokens")
        return -(-rows // stride), -(-columns // stride)

    def _stride(self, fits: Callable[[int], bool], what: str) -> int:
        for stride in (1, 2, 4, 8, 16, 32, 64):
            if fits(stride):
                return stride
        raise ValueError(f"{what} fit no level of a latent of {self.size[0]} x {self.size[1]}")


def narrow(x: Tensor, dim: int, span: Span) -> Tensor:
    """These rows of `x`."""
    return x.narrow(dim, span[0], span[1] - span[0])


def convolve(conv: Conv, forward: Forward, x: Tensor, others: Tensor, span: Span, dim: int) -> Tensor:
    """Outputs of `conv` that belong to the rows of `span`, where rows outside it are those of `others`.

    `forward` is the convolution's own. Only rows within reach are convolved. Bands start at multiples of the stride.
    """
    (start, stop), stride = span, conv.stride[dim]
    reach = -(-conv.dilation[dim] * (conv.kernel_size[dim] - 1) // stride) * stride
    first, last = max(0, start - reach), min(x.shape[dim], stop + reach)
    seen = [narrow(others, dim, (first, start)), narrow(x, dim, span), narrow(others, dim, (stop, last))]
    y = forward(torch.cat(seen, dim))
    return narrow(y, dim, ((start - first) // stride, -(-(stop - first) // stride)))


class Moments(NamedTuple):
    """Number of values in each group, E[x] and E[x^2], in fp64, where E[x^2] - E[x]^2 does not cancel."""

    count: int
    mean_BG: Tensor
    square_BG: Tensor

    @property
    def variance_BG(self) -> Tensor:
        """Biased variance."""
        return self.square_BG - self.mean_BG.square()


def moments_of(x: Tensor, groups: int) -> Moments:
    """Moments of `x` [B, C, ...]."""
    x_BGn = x.double().reshape(x.shape[0], groups, -1)
    return Moments(x_BGn.shape[-1], x_BGn.mean(-1), x_BGn.square().mean(-1))


def merged(moments: Sequence[Moments]) -> Moments:
    """Moments of all values together, whatever their counts."""
    count = sum(part.count for part in moments)
    mean_BG = sum(part.mean_BG * (part.count / count) for part in moments)
    square_BG = sum(part.square_BG * (part.count / count) for part in moments)
    return Moments(count, mean_BG, square_BG)


def corrected(all_then: Moments, own_then: Moments, own_now: Moments, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mean and variance of all places' last step, moved by the change of the own.

    The own variance where that leaves less than `least` of it; the paper's guard has 0.
    DistriFusion (Li et al., CVPR 2024, arXiv:2402.19481), section 4.3.
    """
    mean_BG = all_then.mean_BG + own_now.mean_BG - own_then.mean_BG
    square_BG = all_then.square_BG + own_now.square_BG - own_then.square_BG
    variance_BG = square_BG - mean_BG.square()
    return mean_BG, torch.where(variance_BG < least * own_now.variance_BG, own_now.variance_BG, variance_BG)


def normalise(norm: nn.GroupNorm, x: Tensor, mean_BG: Tensor, variance_BG: Tensor) -> Tensor:
    """Group norm of `x` [B, C, ...] with these moments."""
    y_BGn = x.double().reshape(x.shape[0], norm.num_groups, -1)
    y = ((y_BGn - mean_BG[..., None]) / (variance_BG[..., None] + norm.eps).sqrt()).view(x.shape)
    if norm.affine:
        per_channel = (-1, *[1] * (x.dim() - 2))
        y = y * norm.weight.double().view(per_channel) + norm.bias.double().view(per_channel)
    return y.to(x.dtype)


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precision is widened."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class KeyValues(NamedTuple):
    """Keys and values as maps [B, N, D, R, S], all of an image or a piece of it."""

    key: Tensor
    value: Tensor

    def piece(self, dim: int, span: Span) -> KeyValues:
        """These rows."""
        return KeyValues(narrow(self.key, dim, span), narrow(self.value, dim, span))


class Tokens(NamedTuple):
    """Keys and values [B, N, k, D], and what is added to each key's logit [k]."""

    key: Tensor
    value: Tensor
    bias: Tensor


def as_tokens(piece: KeyValues) -> Tokens:
    """Every token by itself."""
    key, value = (at_least_fp32(x).flatten(-2).mT for x in piece)
    return Tokens(key, value, key.new_zeros(key.shape[2]))


def corrected_map(kind: str, maps: tuple[Tensor, Tensor, Tensor], spans: Sequence[Span], dim: int) -> Tensor:
    """What is shown of the others' keys or values, brought to this step by what each place says of its own.

    `maps` [B, N, D, R, S]: as they are now, as they are shown, and as they were at the last evaluation.
    """
    pieces = []
    for span in spans:
        now, displayed, old = (narrow(x, dim, span).flatten(-2).mT for x in maps)
        size = narrow(maps[0], dim, span).shape[-2:]
        pieces.append(corrected_tokens(kind, now, displayed, old).mT.unflatten(-1, size))
    return torch.cat(pieces, dim)


def corrected_tokens(kind: str, now: Tensor, displayed: Tensor, old: Tensor) -> Tensor:
    """The same for the tokens of one place [..., l, D]: a regression of what is missing on the old ones, in fp64.

    First of what has changed on the way from the old ones to those shown, at least half of that way and at most all of
    it; then of what is still missing. A factor for each channel comes from some 256 tokens, as does the way; a mean is
    that of all.
    """
    dtype, (now, displayed, old) = now.dtype, (x.double() for x in (now, displayed, old))
    old_mean = old.mean(-2, keepdim=True)
    tokens, width = old.shape[-2:]
    matrices = kind == "linear" and tokens >= 4 * (width + 1)
    apart = 1 if matrices or tokens < 512 else tokens // 256 // 2 * 2 + 1
    way, change = (x[..., ::apart, :] - x[..., ::apart, :].mean(-2, keepdim=True) for x in (displayed - old, now - old))
    length = way.square().sum((-2, -1), keepdim=True)
    along = torch.where(length > 0, (way * change).sum((-2, -1), keepdim=True) / length, 0.0).clamp(0.5, 1.0)
    displayed = old + along * (displayed - old)
    missing = now - displayed
    some_missing, some_old = (x[..., ::apart, :] for x in (missing, old))
    centred = some_old - some_old.mean(-2, keepdim=True)
    squares = centred.square().mean(-2)
    ridge = 1e-3 * squares.mean(-1, keepdim=True)
    if matrices:
        covariance = centred.mT @ centred / tokens + torch.diag_embed(ridge.expand_as(squares))
        added = (old - old_mean) @ torch.linalg.inv(covariance) @ (centred.mT @ missing / tokens)
    else:
        factor = (centred * some_missing).mean(-2) / (squares + ridge)
        added = (old - old_mean) * factor.unsqueeze(-2)
    return (displayed + added + missing.mean(-2, keepdim=True)).to(dtype)


def pooled_tokens(piece: KeyValues, side: int) -> Tokens:
    """One token per window: mean of keys, mean of values, and its logit raised by the log of the window's tokens.

    Windows of side x side tokens start at the piece's first row and column; those at its ends may be smaller.
    """
    counts_RS = _window_sums(torch.ones_like(at_least_fp32(piece.key[0, 0, 0])), side)
    key, value = ((_window_sums(at_least_fp32(x), side) / counts_RS).flatten(-2).mT for x in piece)
    return Tokens(key, value, counts_RS.log().flatten())


def _window_sums(x: Tensor, side: int) -> Tensor:
    rows = torch.cat([window.sum(-2, keepdim=True) for window in x.split(side, -2)], -2)
    return torch.cat([window.sum(-1, keepdim=True) for window in rows.split(side, -1)], -1)


def context_of(
    group_rank: int, displayed: KeyValues, spans: Sequence[Span], dim: int, policy: EmulatedPolicy
) -> Iterator[Tokens]:
    """What `group_rank` attends to beside its own tokens."""
    for other, (start, stop) in enumerate(spans):
        if other == group_rank or policy.context == "none":
            continue
        if policy.context in ("fresh", "all", "partials"):
            yield as_tokens(displayed.piece(dim, (start, stop)))
        elif abs(other - group_rank) > 1:
            if policy.context == "pooled":
                yield pooled_tokens(displayed.piece(dim, (start, stop)), policy.pool)
        else:
            kept = policy.band if policy.context == "pooled" else policy.fraction
            rows = max(1, round(kept * (stop - start)))
            near, rest = _nearest(start, stop, rows, at_end=other < group_rank)
            yield as_tokens(displayed.piece(dim, near))
            if policy.context == "pooled" and rest[0] < rest[1]:
                yield pooled_tokens(displayed.piece(dim, rest), policy.pool)


def _nearest(start: int, stop: int, rows: int, *, at_end: bool) -> tuple[Span, Span]:
    """The rows next to us of a neighbour, and its other rows."""
    if at_end:
        return (stop - rows, stop), (start, stop - rows)
    return (start, start + rows), (start + rows, stop)


class Partial(NamedTuple):
    """Attention over some of the keys: output [B, N, l, D] and log-sum-exp of the logits [B, N, l]."""

    out: Tensor
    lse: Tensor


def attend(query: Tensor, tokens: Sequence[Tokens], scale: float) -> Partial:
    """Softmax attention of `query` [B, N, l, D], written out, in fp32 or better."""
    key, value = torch.cat([part.key for part in tokens], 2), torch.cat([part.value for part in tokens], 2)
    logits = at_least_fp32(query) @ key.mT * scale + torch.cat([part.bias for part in tokens])
    return Partial(logits.softmax(-1) @ value, logits.logsumexp(-1))


def merge(one: Partial, other: Partial) -> Tensor:
    """Attention over the keys of both."""
    weights = torch.stack([one.lse, other.lse]).softmax(0)[..., None]
    return weights[0] * one.out + weights[1] * other.out
