"""Fresh edges, stale context: synchronise the kilobytes, delay the megabytes (ours, after arXiv:2402.19481).

Halo rows and moments weigh a fiftieth of what displaced patches send, and nearly all of their error comes from those
being old. Here they are of this step, in one round per norm and convolution; keys and values, which weigh the rest, are
one step old and have a whole step to arrive. How they have changed since is mostly common to all of a place's tokens:
a few numbers for each channel say it, and are of this step too.

axis        patch
exchanged   halo rows, moments, how keys and values change; keys and values of all, or near ones as they are and far
            ones averaged, or now and then
when        halo, moments and change this step's, keys and values last step's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from patchpar.plan.exchange_policy import (
    BITS,
    CORRECTIONS,
    CachedPartials,
    Correction,
    ExchangePolicy,
    StaleKV,
    check_choice,
    check_count,
    check_fraction,
    check_warmup,
)
from patchpar.plan.kv_selection import AllRows, NearRowsAndPooled
from patchpar.plan.resync import Resync, check_resync
from patchpar.plan.scalars import make_plain
from patchpar.strategies.strategy import PatchStrategy

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshEdges(PatchStrategy):
    """Bands with this step's halo and moments, and the last step's keys and values.

    `context`: "all" keys and values; "pooled": the nearest `band` of each neighbour's rows, and everything farther as
    averages over `pool` x `pool` tokens that count as many as they stand for; "partials": attention to other places is
    kept, and renewed for every layer in every `refresh`-th step.
    `extrapolated`: old keys and values are led on from the last two steps they are known of, along a straight line.
    `correction`: what their owners send of them in this step: "affine", a factor and a summand for each channel;
    "linear", a matrix for each head where it has tokens enough; "none". Neither is of use to partials.
    `bits`: 8 or 4 send the quantised difference to what the receiver holds.
    `quality`: make a step exact where old keys would cost more than this PSNR in dB allows; `budget`: MiB that a rank
    may send per step on average, spent on exact steps where they help most. `warmup_steps`: exact steps at the
    beginning, the first included. Raises PlanError.
    """

    name: ClassVar[str] = "fresh-edges"
    warmup_steps: int = 1
    context: Literal["all", "pooled", "partials"] = "all"
    band: float = 0.1
    pool: int = 4
    refresh: int = 4
    extrapolated: bool = True
    correction: Correction = "affine"
    bits: int = 16
    quality: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_warmup(self.name, self.warmup_steps)
        check_choice(self.name, "context", self.context, ("all", "pooled", "partials"))
        check_choice(self.name, "bits", self.bits, BITS if self.context != "partials" else (16,))
        check_choice(self.name, "correction", self.correction, CORRECTIONS)
        check_choice(self.name, "extrapolated", self.extrapolated, (True, False))
        check_fraction(self.name, "band", self.band)
        check_count(self.name, "pool", self.pool)
        check_count(self.name, "refresh", self.refresh)
        check_resync(self.name, self.quality, self.budget)

    @property
    def policy(self) -> ExchangePolicy:
        """Edges of this step, keys of the last."""
        selection = NearRowsAndPooled(self.band, self.pool) if self.context == "pooled" else AllRows()
        context = StaleKV(
            selection=selection, bits=self.bits, extrapolated=self.extrapolated, correction=self.correction
        )
        budget = None if self.budget is None else self.budget * MIB
        correction = "none" if self.context == "partials" else self.correction
        rules = Resync(quality=self.quality, budget=budget, correction=correction)
        return ExchangePolicy(
            name=self.name,
            warmup_steps=self.warmup_steps,
            context=CachedPartials(refresh=self.refresh) if self.context == "partials" else context,
            resync=None if self.quality is None and budget is None else rules,
        )
