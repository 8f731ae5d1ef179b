"""How a place's keys and values have changed since the last step, in a few numbers that can be of this step.

Most of that change is common to all tokens of a place: it comes from the timestep, and from how much noise is left. So
the owner fits what it has now to what others hold of it, and sends the fit at once; whoever holds the old tokens
applies it to them. Kilobytes again are of this step, and megabytes of the last.

    affine   a factor and a summand for each channel: 2 numbers a channel, however many tokens
    linear   a matrix for each head and a summand for each channel: D + 1 numbers a channel

Where others lead the old tokens on along a line, each also says how much of that way its tokens went: a number a head,
between half of it and all. At first keys slow down, and the whole way would be further from the truth than none of it;
but what stops short errs behind at every step, and such errors do not cancel.

Averages over windows of tokens need no fit of their own, since both commute with averaging.

Shape letters: B batch, l tokens, N heads, D head width.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.plan.exchange_policy import Correction

RIDGE = 1e-3  # of the mean square of the channels: what keeps a fit to few, or to equal tokens from running away
SAMPLE = 256  # tokens that are enough for a factor a channel
LEAST, MOST = 0.5, 1.0  # of the way along the line: measured, see docs/decisions/0017
TOKENS_PER_NUMBER = 4  # a matrix for fewer tokens than this would weigh more than a quarter of them


class CorrectionFit(NamedTuple):
    """What is made of the tokens of the last step and what is held.

    First `along` [B, N] of the way from those to this; to that is added `scale` times the tokens of the last step, and
    `shift` [B, N, D]. `scale` is [B, N, D], or [B, N, D, D], from old channels to what is added.
    """

    along: Tensor
    scale: Tensor
    shift: Tensor


def kind_for(wanted: Correction, tokens: int, width: int) -> Correction:
    """Which fit is sent for so many tokens of heads of this width: a matrix only where it weighs little beside them."""
    return "affine" if wanted == "linear" and tokens < TOKENS_PER_NUMBER * (width + 1) else wanted


def specs_of(kind: Correction, shape: tuple[int, ...], dtype: torch.dtype) -> list[TensorSpec]:
    """What comes from a place whose tokens are of `shape` [B, l, N, D]."""
    batch, _, heads, width = shape
    scale = (batch, heads, width, width) if kind == "linear" else (batch, heads, width)
    return [TensorSpec((batch, heads), dtype), TensorSpec(scale, dtype), TensorSpec((batch, heads, width), dtype)]


class FitSamples(NamedTuple):
    """What a fit reads of tokens [B, l, N, D]: the mean of all [B, N, D] in fp32, and every so manyth of them."""

    mean: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, x_BlND: Tensor, kind: Correction) -> "FitSamples":
        """Every token for matrices; else an odd stride, so that rows of a picture begin at other columns."""
        tokens = x_BlND.shape[1]
        stride = 1 if kind == "linear" or tokens < 2 * SAMPLE else tokens // SAMPLE | 1
        return cls(x_BlND.mean(1, dtype=torch.float32), x_BlND[:, ::stride])

    def kept(self) -> "FitSamples":
        """The same, in memory of its own."""
        return FitSamples(self.mean, self.tokens.clone())

    def line_to(self, last: "FitSamples", step_ratio: Tensor | float) -> "FitSamples":
        """What receivers make of these and of the last ones."""
        return FitSamples(*(on_the_line(x, y, step_ratio) for x, y in zip(self, last, strict=True)))


def fitted(kind: Correction, now: FitSamples, held: FitSamples, old: FitSamples) -> CorrectionFit:
    """The fit that takes `held`, which others make of the last steps, nearest to `now`, out of `old`, the last step's.

    Least squares with a slight pull towards no factor, in fp32: the way along the line, then the rest. Means are those
    of all tokens, since all would share an error in them, and attention does not average that away; factors are less
    delicate.
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
    """How much of the way tokens have moved, for each head."""
    square = way_BlND.square().mean((1, 3)) + torch.finfo(torch.float32).tiny
    return ((way_BlND * moved_BlND).mean((1, 3)) / square).clamp(LEAST, MOST)


def _matrix(old_BNlD: Tensor, missing_BNlD: Tensor) -> Tensor:
    gram = old_BNlD.mT @ old_BNlD
    squares = gram.diagonal(dim1=-2, dim2=-1)
    pull = RIDGE * squares.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny
    return torch.linalg.solve(gram + torch.diag_embed(pull.expand_as(squares)), old_BNlD.mT @ missing_BNlD)


def correct(held_BlND: Tensor, old_BlND: Tensor, fit: CorrectionFit) -> None:
    """Bring `held` to this step, in place. `old`: the same tokens as they were in the last step, or `held` itself."""
    if held_BlND is not old_BlND:
        torch.lerp(old_BlND, held_BlND, fit.along[:, None, :, None], out=held_BlND)
    if fit.scale.ndim == 3:
        held_BlND.addcmul_(old_BlND, fit.scale[:, None]).add_(fit.shift[:, None])
    else:
        moved_BNlD = old_BlND.transpose(1, 2) @ fit.scale
        held_BlND.add_(moved_BNlD.transpose(1, 2)).add_(fit.shift[:, None])


class OwnPast:
    """Our keys and values of the last two steps, out of which others make what they hold of us.

    `extrapolated`: others follow the straight line through both.
    """

    def __init__(self, wanted: Correction, *, extrapolated: bool) -> None:
        self._wanted, self._extrapolated = wanted, extrapolated
        self._last: tuple[FitSamples, ...] = ()
        self._before: tuple[FitSamples, ...] = ()

    def remember(self, own: Sequence[Tensor], *, continues: bool) -> None:
        """Our tokens [B, l, N, D] of this step. `continues`: what is remembered is of the step before."""
        if self._wanted != "none":
            self._keep([FitSamples.of(x, self._kind(x.shape)) for x in own], continues=continues)

    def fits(self, own: Sequence[Tensor], step_ratio: Tensor | float) -> list[Tensor]:
        """What to send of our tokens of this step, which goes `step_ratio` as far as the last, in units of that.

        They are remembered.
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
        """What comes from a place that has tokens of these shapes."""
        dtype = self._last[0].tokens.dtype
        return [s for shape in shapes for s in specs_of(self._kind(shape), shape, dtype)]

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        for seen in (*self._last, *self._before):
            yield from seen


def on_the_line(before: Tensor, last: Tensor, step_ratio: Tensor | float, *, into: Tensor | None = None) -> Tensor:
    """From two values on to the next, `step_ratio` as far as from the first to the second; written `into`, if given."""
    return torch.lerp(before, last, 1 + torch.as_tensor(step_ratio, dtype=last.dtype, device=last.device), out=into)
