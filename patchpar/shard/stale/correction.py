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

Shape letters: B batch, l tokens, N heads, D head width.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.plan.exchange_policy import Correction

RIDGE = 1e-3  # of the mean square of the channels: bounds a fit to few or to equal tokens
SAMPLE = 256  # tokens that suffice for a scale a channel
LEAST, MOST = 0.5, 1.0  # fraction of the line: measured, see docs/decisions/0017
TOKENS_PER_NUMBER = 4  # a matrix for fewer tokens than this would weigh more than a quarter of them


class CorrectionFit(NamedTuple):
    """The correction of one tensor of tokens: old + along * (held - old) + scale * old + shift.

    `along` [B, N], `shift` [B, N, D], `scale` [B, N, D] or, as a matrix from old channels to the change, [B, N, D, D].
    """

    along: Tensor
    scale: Tensor
    shift: Tensor


def kind_for(wanted: Correction, tokens: int, width: int) -> Correction:
    """Return the fit for this many tokens with heads of this width: a matrix only where it is small beside them."""
    return "affine" if wanted == "linear" and tokens < TOKENS_PER_NUMBER * (width + 1) else wanted


def specs_of(kind: Correction, shape: tuple[int, ...], dtype: torch.dtype) -> list[TensorSpec]:
    """Return the specs of the fit that a rank with tokens of `shape` [B, l, N, D] sends."""
    batch, _, heads, width = shape
    scale = (batch, heads, width, width) if kind == "linear" else (batch, heads, width)
    return [TensorSpec((batch, heads), dtype), TensorSpec(scale, dtype), TensorSpec((batch, heads, width), dtype)]


class FitSamples(NamedTuple):
    """What a fit reads of tokens [B, l, N, D]: their mean [B, N, D] in fp32, and every n-th token [B, s, N, D]."""

    mean: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, x_BlND: Tensor, kind: Correction) -> "FitSamples":
        """Sample tokens [B, l, N, D]: all for a matrix, else with an odd stride, so that rows differ in columns."""
        tokens = x_BlND.shape[1]
        stride = 1 if kind == "linear" or tokens < 2 * SAMPLE else tokens // SAMPLE | 1
        return cls(x_BlND.mean(1, dtype=torch.float32), x_BlND[:, ::stride])

    def kept(self) -> "FitSamples":
        """Return a copy that shares no token memory."""
        return FitSamples(self.mean, self.tokens.clone())

    def line_to(self, last: "FitSamples", step_ratio: Tensor | float) -> "FitSamples":
        """Return samples [B, N, D] and [B, s, N, D] extrapolated from these through `last`, as receivers do.

        `step_ratio`: length of the step to come over that from these to `last`, a scalar.
        """
        return FitSamples(*(on_the_line(x, y, step_ratio) for x, y in zip(self, last, strict=True)))


def fitted(kind: Correction, now: FitSamples, held: FitSamples, old: FitSamples) -> CorrectionFit:
    """Return the fit that brings `held`, which other ranks extrapolated from `old` (stale), nearest to `now` (fresh).

    Ridge regression in fp32: first the fraction of the line, then the rest. Means are taken over all tokens, since an
    error in them is common to all and attention does not average it away; scales are less sensitive.
    """
    dtype = now.tokens.dtype
    some_now, some_held, some_old = (x.tokens.float() for x in (now, held, old))
    few_old, few_way, few_missing = map(_centred, (some_old, some_held - some_old, some_now - some_old))
    along = _along(few_way, few_missing).to(dtype)
    few_missing = few_missing - along.float()[:, None, :, None] * few_way
    if kind == "linear":
        scale = _matrix(few_old.transpose(1, 2), few_missing.transpose(1, 2))
        moved = (old.mean.unsqueeze(-2) @ scale).squeeze(-2)
    else:
        square = few_old.square().mean(1)
        pull = RIDGE * square.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny
        scale = (few_old * few_missing).mean(1) / (square + pull)
        moved = old.mean * scale
    went = along.float().unsqueeze(-1) * (held.mean - old.mean)
    return CorrectionFit(along, scale.to(dtype), (now.mean - old.mean - went - moved).to(dtype))


def _centred(x_BlND: Tensor) -> Tensor:
    return x_BlND - x_BlND.mean(1, keepdim=True)


def _along(way_BlND: Tensor, moved_BlND: Tensor) -> Tensor:
    """Return the fraction [B, N] of the line that tokens moved, for each head."""
    square = way_BlND.square().mean((1, 3)) + torch.finfo(torch.float32).tiny
    return ((way_BlND * moved_BlND).mean((1, 3)) / square).clamp(LEAST, MOST)


def _matrix(old_BNlD: Tensor, missing_BNlD: Tensor) -> Tensor:
    gram = old_BNlD.mT @ old_BNlD
    squares = gram.diagonal(dim1=-2, dim2=-1)
    pull = RIDGE * squares.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny
    return torch.linalg.solve(gram + torch.diag_embed(pull.expand_as(squares)), old_BNlD.mT @ missing_BNlD)


def correct(held_BlND: Tensor, old_BlND: Tensor, fit: CorrectionFit) -> None:
    """Apply a fit to `held_BlND` in place. `old_BlND`: the same tokens in the previous step, or `held_BlND` itself."""
    if held_BlND is not old_BlND:
        torch.lerp(old_BlND, held_BlND, fit.along[:, None, :, None], out=held_BlND)
    if fit.scale.ndim == 3:
        held_BlND.addcmul_(old_BlND, fit.scale[:, None]).add_(fit.shift[:, None])
    else:
        moved_BNlD = old_BlND.transpose(1, 2) @ fit.scale
        held_BlND.add_(moved_BNlD.transpose(1, 2)).add_(fit.shift[:, None])


class OwnPast:
    """Samples of this rank's keys and values in the last two steps, from which other ranks compute their copies.

    `extrapolated`: the others follow the straight line through both.
    """

    def __init__(self, wanted: Correction, *, extrapolated: bool) -> None:
        self._wanted, self._extrapolated = wanted, extrapolated
        self._last: tuple[FitSamples, ...] = ()
        self._before: tuple[FitSamples, ...] = ()

    def remember(self, own: Sequence[Tensor], *, continues: bool) -> None:
        """Store samples of this step's tokens [B, l, N, D]. `continues`: the stored ones are of the previous step."""
        if self._wanted != "none":
            self._keep([FitSamples.of(x, self._kind(x.shape)) for x in own], continues=continues)

    def fits(self, own: Sequence[Tensor], step_ratio: Tensor | float) -> list[Tensor]:
        """Return the fits to send, three tensors for each of `own`, and store its samples.

        `own`: this step's tokens [B, l, N, D]; `step_ratio`: length of this step over that of the last, a scalar.
        The fits are `along` [B, N], `scale` [B, N, D] or [B, N, D, D], `shift` [B, N, D].
        """
        found: list[Tensor] = []
        seen = [FitSamples.of(x, self._kind(x.shape)) for x in own]
        for index, (x, now, old) in enumerate(zip(own, seen, self._last, strict=True)):
            held = self._before[index].line_to(old, step_ratio) if self._before else old
            found += fitted(self._kind(x.shape), now, held, old)
        self._keep(seen, continues=True)
        return found

    def _kind(self, shape: tuple[int, ...]) -> Correction:
        return kind_for(self._wanted, shape[1], shape[3])

    def _keep(self, seen: Sequence[FitSamples], *, continues: bool) -> None:
        self._before = self._last if continues and self._extrapolated else ()
        self._last = tuple(each.kept() for each in seen)

    def specs(self, shapes: Sequence[tuple[int, ...]]) -> list[TensorSpec]:
        """Return the specs of the fits that a rank with tokens of these shapes, [B, l, N, D] each, sends."""
        dtype = self._last[0].tokens.dtype
        return [s for shape in shapes for s in specs_of(self._kind(shape), shape, dtype)]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the stored means [B, N, D] and sampled tokens [B, s, N, D]."""
        for seen in (*self._last, *self._before):
            yield from seen


def on_the_line(before: Tensor, last: Tensor, step_ratio: Tensor | float, *, into: Tensor | None = None) -> Tensor:
    """Extrapolate last + step_ratio * (last - before), of any shape; written to `into` of the same shape, if given."""
    return torch.lerp(before, last, 1 + torch.as_tensor(step_ratio, dtype=last.dtype, device=last.device), out=into)
