"""Correction of stale keys and values: how a rank's tokens changed since the previous step, in a few fresh numbers.

Most of that change is common to all tokens of a rank: it comes from the timestep and the remaining noise. So the owner
fits its fresh tokens to the stale ones that other ranks hold, and sends the fit at once; the others apply it to the
stale tokens. Kilobytes are fresh, megabytes are stale.

    affine   a scale and a shift for each channel: 2 numbers a channel, however many tokens
    linear   a matrix for each head and a shift for each channel: D + 1 numbers a channel

Stale tokens are extrapolated along the line through those of the last two steps, by a fraction of it for each head
that their owner measures: how far its tokens went. In early steps keys slow down, and the full extrapolation would be
off by more than none; but one that stops short lags at every step, and such errors do not cancel. So it is no less
than half of the line, and no more than all of it. Where the others extrapolate, they get the fraction with the fit.
Where an owner does, so that nobody else has to hold two steps of its tokens, it has that of the step before only,
which is behind one that grows: so no less than 0.7. The fit is then one of what it has extrapolated.

Averages over windows of tokens need no fit of their own, since both fits commute with averaging.

The tokens are those of keys and values together. Shape letters: l tokens, s sampled ones, X = 2, B (keys and values;
batch), N heads, D head width; R ranks in a row with equally many tokens.

Ours: docs/decisions/0017 has the reasons and figures.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.plan.exchange_policy import Correction
from patchpar.shard.kernels.correct_tokens import repeated_extrapolation
from patchpar.shard.kernels.fit_matrices import center_tokens
from patchpar.shard.kernels.fit_tokens import LEAST_BEFOREHAND, empty_fit, repeated_fit, sample_tokens

SAMPLE = 256  # tokens that suffice for a scale a channel
TOKENS_PER_NUMBER = 4  # a matrix for fewer tokens than this would weigh more than a quarter of them


def kind_for(wanted: Correction, tokens: int, width: int) -> Correction:
    """Return the fit for this many tokens with heads of this width: a matrix only where it is small beside them."""
    return "affine" if wanted == "linear" and tokens < TOKENS_PER_NUMBER * (width + 1) else wanted


def numbers_of(kind: Correction, width: int) -> int:
    """Return how many numbers a fit has for each head of `width` channels."""
    return 1 + width + width * (width if kind == "linear" else 1)


def stride_for(kind: Correction, tokens: int) -> int:
    """Return how far apart the sampled tokens are, of so many: all for a matrix, else an odd number.

    So rows differ in the columns that are sampled.
    """
    return 1 if kind == "linear" or tokens < 2 * SAMPLE else tokens // SAMPLE | 1


class FitSamples(NamedTuple):
    """What a fit reads of tokens [l, X, N, D]: their mean [X, N, D] in fp32, and all or every n-th [s, X, N, D]."""

    mean: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, x_lXND: Tensor, kind: Correction, kept: Tensor | None = None) -> "FitSamples":
        """Return memory for samples of tokens [l, X, N, D], which are all of them in `kept` [l, X, N, D] if given."""
        mean = x_lXND.new_empty(x_lXND.shape[1:], dtype=torch.float32)
        if kept is not None:
            return cls(mean, kept)
        stride = stride_for(kind, x_lXND.shape[0])
        return cls(mean, x_lXND.new_empty((len(range(0, x_lXND.shape[0], stride)), *x_lXND.shape[1:])))


def packed_matrices(pairs_XNlC: Tensor, numbers_XNC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fit [X, N, 1 + D D + D] with matrices, of what `center_tokens` returns: [X, N, l, 2 D] and numbers.

    It brings what others hold nearest to what has to come of it.
    """
    width = pairs_XNlC.shape[-1] // 2
    line, ridge, shift, mean = numbers_XNC.split_with_sizes((1, 1, width, width), -1)
    moments = pairs_XNlC[..., :width].mT @ pairs_XNlC
    moments.diagonal(dim1=-2, dim2=-1).add_(ridge)
    # Positive definite by the ridge, so nothing needs to be checked, which would read from the device.
    matrix = torch.linalg.solve_ex(moments[..., :width], moments[..., width:], check_errors=False).result
    rows, means = shift.reshape(-1, 1, width), mean.reshape(-1, 1, width)
    shift = torch.baddbmm(rows, means, matrix.reshape(-1, width, width), alpha=-1).view(shift.shape)
    return torch.cat([line, matrix.flatten(-2), shift], -1).to(dtype)


class OwnTokens(NamedTuple):
    """This rank's tokens of the last step and, where it extrapolates them, of the one before, [l, X, N, D] each."""

    last: Tensor
    before: Tensor | None


class OwnPast:
    """Samples of this rank's keys and values in the last two steps, from which other ranks compute their copies.

    `extrapolated`: along the straight line through both, by the others, or by this rank if its tokens are `kept`. These
    become those of a step when it is remembered or fitted. All tensors stay where they are from step to step.
    """

    def __init__(self, wanted: Correction, *, extrapolated: bool, kept: OwnTokens | None = None) -> None:
        self._wanted, self._extrapolated = wanted, extrapolated
        self._kind, self._stride = wanted, 1  # of this rank's tokens, of which there are always as many
        self._kept = kept
        self._last: FitSamples | None = None
        self._before: FitSamples | None = None
        self._fit, self._extrapolate = repeated_fit(), repeated_extrapolation()
        self._along: Tensor | None = None  # fraction of the line in the last step, where this rank extrapolates

    def remember(self, own_lXND: Tensor, *, continues: bool, ratio: Tensor | None = None) -> None:
        """Store samples of an exact step's tokens [l, X, N, D]. `continues`: the stored ones are of the step before.

        `ratio` as in `fit`, which is needed where this rank extrapolates.
        """
        if self._wanted == "none":
            return
        if self._last is None:
            self._allocate(own_lXND)
        assert self._last is not None
        if self._along is not None and not continues:
            self._along.fill_(LEAST_BEFOREHAND)
        elif self._along is not None:  # how far tokens went along their line is known of an exact step, too
            assert ratio is not None
            self.fit(own_lXND, ratio)
            return
        samples = (*self._last, *(self._before or (None, None)))
        sample_tokens(own_lXND, *samples, self._stride, continues)

    def _allocate(self, own_lXND: Tensor) -> None:
        tokens, width = own_lXND.shape[0], own_lXND.shape[-1]
        self._kind = kind = kind_for(self._wanted, tokens, width)
        self._stride = stride_for(kind, tokens)
        last, before = self._kept or (None, None)
        self._last = FitSamples.empty(own_lXND, kind, last)
        if self._extrapolated:
            self._before = FitSamples.empty(own_lXND, kind, before)
        if before is not None:
            self._along = own_lXND.new_empty(own_lXND.shape[1:-1], dtype=torch.float32)

    def fit(self, own_lXND: Tensor, ratio: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the fit [X, N, numbers] of this step's tokens [l, X, N, D] for the other ranks, and sample these.

        `ratio`: length of this step over that of the last, a scalar in fp32. `into`: memory for it, but for matrices.
        """
        assert self._last is not None, "the step before has been remembered"
        last, before = self._last, self._before
        if self._kind == "affine":
            into = empty_fit(own_lXND) if into is None else into
            self._fit(into, own_lXND, *last, *(before or (None, None)), self._along, ratio, self._stride)
            return into
        read = center_tokens(own_lXND, *last, *(before or (None, None)), self._along, ratio)
        return packed_matrices(*read, own_lXND.dtype)

    def extrapolate(self, into_lXND: Tensor, kept: OwnTokens, ratio: Tensor) -> None:
        """Write tokens that are kept, as they are expected to be in this step, to `into_lXND` [l, X, N, D]."""
        assert kept.before is not None
        self._extrapolate(into_lXND, *kept, self._along, ratio)

    def numbers(self, tokens: int, width: int) -> int:
        """Return how many numbers a rank with so many tokens sends for each head of this width."""
        return numbers_of(kind_for(self._wanted, tokens, width), width)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the stored means [X, N, D], sampled tokens [s, X, N, D], and fractions [X, N]."""
        for seen in (self._last, self._before):
            yield from seen or ()
        if self._along is not None:
            yield self._along
