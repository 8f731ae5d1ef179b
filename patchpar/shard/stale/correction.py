"""Correction of stale keys and values: how a rank's tokens changed since the previous step, in a few fresh numbers.

Most of that change is common to all tokens of a rank: it comes from the timestep and the remaining noise. So the owner
fits its fresh tokens to the stale ones that other ranks hold, and sends the fit at once; the others apply it to the
stale tokens. Kilobytes are fresh, megabytes are stale.

    affine   a scale and a shift for each channel: 2 numbers a channel, however many tokens
    linear   a matrix for each head and a shift for each channel: D + 1 numbers a channel

Where the others extrapolate stale tokens along a line, each rank also sends which fraction of that line its tokens
moved: a number a head, between 0.5 and 1. In early steps keys slow down, and the full extrapolation would be further
off than none; but one that stops short lags at every step, and such errors do not cancel.

Averages over windows of tokens need no fit of their own, since both fits commute with averaging.

The tokens are those of keys and values together. Shape letters: l tokens, X = 2, B (keys and values; batch), N heads,
D head width; P ranks in a row with equally many tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.plan.exchange_policy import Correction
from patchpar.shard.precision import wide

RIDGE = 1e-3  # of the mean square of the channels: bounds a fit to few or to equal tokens
SAMPLE = 256  # tokens that suffice for a scale a channel
LEAST, MOST = 0.5, 1.0  # fraction of the line: measured, see docs/decisions/0017
TOKENS_PER_NUMBER = 4  # a matrix for fewer tokens than this would weigh more than a quarter of them


class CorrectionFit(NamedTuple):
    """The correction of tokens: old + along * (held - old) + scale * old + shift.

    `along` [..., N], `shift` [..., N, D], `scale` [..., N, D] or, as a matrix from old channels to the change,
    [..., N, D, D].
    """

    along: Tensor
    scale: Tensor
    shift: Tensor

    def packed(self) -> Tensor:
        """Return the fit as one message [..., N, numbers]."""
        return torch.cat([self.along.unsqueeze(-1), self.scale.flatten(self.along.ndim), self.shift], -1)

    @classmethod
    def of(cls, packed: Tensor, width: int) -> "CorrectionFit":
        """Return the fit of a message [..., N, numbers] for heads of `width`, as views."""
        along, scale, shift = packed.split_with_sizes((1, packed.shape[-1] - width - 1, width), -1)
        if scale.shape[-1] > width:
            scale = torch.unflatten(scale, -1, (width, width))
        return cls(along.squeeze(-1), scale, shift)


def kind_for(wanted: Correction, tokens: int, width: int) -> Correction:
    """Return the fit for this many tokens with heads of this width: a matrix only where it is small beside them."""
    return "affine" if wanted == "linear" and tokens < TOKENS_PER_NUMBER * (width + 1) else wanted


def numbers_of(kind: Correction, width: int) -> int:
    """Return how many numbers a fit has for each head of this width."""
    return 1 + width + width * (width if kind == "linear" else 1)


class FitSamples(NamedTuple):
    """What a fit reads of tokens [l, X, N, D]: their mean [X, N, D] in fp32, and every n-th token [s, X, N, D]."""

    mean: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, x_lXND: Tensor, kind: Correction) -> "FitSamples":
        """Sample tokens [l, X, N, D]: all for a matrix, else with an odd stride, so that rows differ in columns."""
        return cls(x_lXND.mean(0, dtype=torch.float32), x_lXND[:: stride_for(kind, x_lXND.shape[0])])

    def kept(self) -> "FitSamples":
        """Return a copy that shares no memory."""
        return FitSamples(self.mean.clone(), self.tokens.clone())

    def copy_(self, other: "FitSamples") -> None:
        """Take the values of `other`, of the same shape."""
        self.mean.copy_(other.mean)
        self.tokens.copy_(other.tokens)

    def line_to(self, last: "FitSamples", step_ratio: Tensor | float) -> "FitSamples":
        """Return samples [X, N, D] and [s, X, N, D] extrapolated from these through `last`, as receivers do.

        `step_ratio`: length of the step to come over that from these to `last`, a scalar.
        """
        return FitSamples(*(on_the_line(x, y, step_ratio) for x, y in zip(self, last, strict=True)))


def stride_for(kind: Correction, tokens: int) -> int:
    """Return how far apart the sampled tokens are, of so many."""
    return 1 if kind == "linear" or tokens < 2 * SAMPLE else tokens // SAMPLE | 1


def fitted(kind: Correction, now: FitSamples, held: FitSamples, old: FitSamples) -> CorrectionFit:
    """Return the fit that brings `held`, which other ranks extrapolated from `old` (stale), nearest to `now` (fresh).

    Ridge regression in fp32: first the fraction of the line, then the rest. Means are taken over all tokens, since an
    error in them is common to all and attention does not average it away; scales are less sensitive.
    """
    dtype = now.tokens.dtype
    some_now, some_held, some_old = (x.tokens.float() for x in (now, held, old))
    few_old, few_way, few_missing = map(_centred, (some_old, some_held - some_old, some_now - some_old))
    along = _along(few_way, few_missing).to(dtype)
    far = along.float().unsqueeze(-1)
    few_missing = torch.addcmul(few_missing, far, few_way, value=-1)
    if kind == "linear":
        scale = _matrix(few_old.movedim(0, -2), few_missing.movedim(0, -2))
        moved = (old.mean.unsqueeze(-2) @ scale).squeeze(-2)
    else:
        square = few_old.square().mean(0)
        pull = RIDGE * square.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny
        scale = (few_old * few_missing).mean(0) / (square + pull)
        moved = old.mean * scale
    went = far * (held.mean - old.mean)
    return CorrectionFit(along, scale.to(dtype), (now.mean - old.mean - went - moved).to(dtype))


def _centred(x_lXND: Tensor) -> Tensor:
    return x_lXND - x_lXND.mean(0, keepdim=True)


def _along(way_lXND: Tensor, moved_lXND: Tensor) -> Tensor:
    """Return the fraction [X, N] of the line that tokens moved, for each head."""
    square = way_lXND.square().mean((0, -1)) + torch.finfo(torch.float32).tiny
    return ((way_lXND * moved_lXND).mean((0, -1)) / square).clamp(LEAST, MOST)


def _matrix(old_XNlD: Tensor, missing_XNlD: Tensor) -> Tensor:
    gram = old_XNlD.mT @ old_XNlD
    squares = gram.diagonal(dim1=-2, dim2=-1)
    pull = RIDGE * squares.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny
    moments = gram + torch.diag_embed(pull.expand_as(squares))
    # Positive definite by the ridge, so nothing needs to be checked, which would read from the device.
    return torch.linalg.solve_ex(moments, old_XNlD.mT @ missing_XNlD, check_errors=False).result


def correct(
    into_PlXND: Tensor, newest: Tensor, previous: Tensor | None, fit: CorrectionFit, step_ratio: Tensor | float
) -> None:
    """Write tokens of some ranks, extrapolated and corrected, to `into_PlXND` [P, l, X, N, D].

    `newest` and `previous`: the tokens [P, l, X, N, D] of the last two steps; without `previous` nothing is
    extrapolated. `fit`: of each rank, [P, X, N], [P, X, N, D] or [P, X, N, D, D], [P, X, N, D]. Sums are in fp32.
    """
    shift = wide(fit.shift).unsqueeze(1)
    matrices = fit.scale.ndim > fit.shift.ndim
    gain = torch.ones_like(shift) if matrices else 1 + wide(fit.scale).unsqueeze(1)
    if matrices:
        shift = shift + wide((newest.movedim(1, -2) @ fit.scale).movedim(-2, 1))
    out = into_PlXND if into_PlXND.dtype == shift.dtype else None
    if previous is not None:
        reach = (wide(fit.along) * step_ratio)[:, None, ..., None]
        gain = gain + reach
        shift = torch.addcmul(shift, wide(previous), reach, value=-1, out=out)
    moved = torch.addcmul(shift, wide(newest), gain, out=out)
    if out is None:
        into_PlXND.copy_(moved)


class OwnPast:
    """Samples of this rank's keys and values in the last two steps, from which other ranks compute their copies.

    `extrapolated`: the others follow the straight line through both. All tensors stay where they are from step to step.
    """

    def __init__(self, wanted: Correction, *, extrapolated: bool) -> None:
        self._wanted, self._extrapolated = wanted, extrapolated
        self._last: FitSamples | None = None
        self._before: FitSamples | None = None

    def remember(self, own_lXND: Tensor, *, continues: bool) -> None:
        """Store samples of this step's tokens [l, X, N, D]. `continues`: the stored ones are of the previous step."""
        if self._wanted == "none":
            return
        seen = FitSamples.of(own_lXND, self._kind(own_lXND))
        if self._last is None:
            self._last, self._before = seen.kept(), seen.kept() if self._extrapolated else None
        elif self._before is not None:
            self._before.copy_(self._last if continues else seen)
        self._last.copy_(seen)

    def fit(self, own_lXND: Tensor, step_ratio: Tensor | float) -> CorrectionFit:
        """Return the fit of this step's tokens [l, X, N, D] for the other ranks, and store samples of these.

        `step_ratio`: length of this step over that of the last, a scalar.
        """
        assert self._last is not None, "the step before has been remembered"
        seen, last = FitSamples.of(own_lXND, self._kind(own_lXND)), self._last
        held = last if self._before is None else self._before.line_to(last, step_ratio)
        found = fitted(self._kind(own_lXND), seen, held, last)
        if self._before is not None:
            self._before.copy_(last)
        last.copy_(seen)
        return found

    def numbers(self, tokens: int, width: int) -> int:
        """Return how many numbers a rank with so many tokens sends for each head of this width."""
        return numbers_of(kind_for(self._wanted, tokens, width), width)

    def _kind(self, own_lXND: Tensor) -> Correction:
        return kind_for(self._wanted, own_lXND.shape[0], own_lXND.shape[-1])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the stored means [X, N, D] and sampled tokens [s, X, N, D]."""
        for seen in (self._last, self._before):
            yield from seen or ()


def on_the_line(before: Tensor, last: Tensor, step_ratio: Tensor | float, *, into: Tensor | None = None) -> Tensor:
    """Extrapolate last + step_ratio * (last - before), of any shape; written to `into` of the same shape, if given."""
    return torch.lerp(before, last, 1 + torch.as_tensor(step_ratio, dtype=last.dtype, device=last.device), out=into)
