"""Fresh edges, stale context: synchronous halos and moments, stale keys and values (ours, after arXiv:2402.19481).

Halo rows and moments are a fiftieth of the bytes that displaced patches send, and nearly all of their error comes from
stale halos and moments. Here these are fresh, in one round per norm and convolution; keys and values, the other bytes,
are one step old and have a whole step to arrive. Their change since then is mostly common to all tokens of a rank: a
few numbers for each channel describe it, and these are fresh too.

axis        patch
exchanged   halo rows, moments, corrections of keys and values; keys and values of all, or near ones unchanged and far
            ones averaged, or only in every few steps
when        halo, moments and corrections fresh, keys and values stale
"""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from patchpar.errors import PlanError
from patchpar.plan.exchange_policy import (
    BITS,
    CORRECTIONS,
    TEXTS,
    CachedPartials,
    Correction,
    ExchangePolicy,
    StaleKV,
    Text,
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
OF_CONTEXT = {"band": "pooled", "pool": "pooled", "refresh": "partials"}
"""The context that an option is of: with another it would change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshEdges(PatchStrategy):
    """Bands with fresh halo and moments, and stale keys and values.

    `context`: "all" keys and values; "pooled": the nearest fraction `band` of each neighbour's rows, and all others as
    averages over `pool` x `pool` tokens, weighted by that number; "partials": attention to other ranks is cached, and
    recomputed for every layer in every `refresh`-th step.
    `extrapolated`: extrapolate stale keys and values linearly from the last two steps that were received.
    `correction`: what their owners send fresh: "affine", scale and shift for each channel; "linear", a matrix for each
    head with enough tokens; "none". Partials use neither.
    `bits`: 8 or 4 send the quantised difference to what the receiver holds.
    `quality`: make a step exact where stale keys would cost more than this PSNR in dB allows; `budget`: MiB that a rank
    may send per step on average, spent on exact steps where they help most. `warmup_steps`: exact steps at the
    beginning, the first included.
    `text` of a transformer with joint attention: "split" between ranks, its keys and values fresh; or computed "whole"
    by each rank; "auto" splits it where keys and values of all tokens are sent as they are. Raises PlanError, also for
    options of another context.
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
    text: Text | Literal["auto"] = "auto"

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
        check_choice(self.name, "text", self.text, ("auto", *TEXTS))
        check_resync(self.name, self.quality, self.budget)
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise PlanError for an option that another one leaves without effect."""
        for option in fields(self):
            value, context = getattr(self, option.name), OF_CONTEXT.get(option.name, self.context)
            if value != option.default and self.context != context:
                raise PlanError(
                    f"{self.name}: {option.name}={value} changes nothing with context={self.context}: use "
                    f"context={context}, or leave {option.name} out"
                )
        if self.context == "partials" and self.correction == "linear":
            raise PlanError(
                f"{self.name}: correction={self.correction} changes nothing with context=partials, which caches no "
                "keys: use context=all or pooled, or leave correction out"
            )

    @property
    def policy(self) -> ExchangePolicy:
        """Fresh edges, stale keys."""
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
            text=self._text,
        )

    @property
    def _text(self) -> Text:
        """Whether text is split: where less is sent, for slow links, its keys and values would be most of it."""
        if self.text != "auto":
            return self.text
        return "split" if self.context == "all" and self.bits == 16 else "whole"
