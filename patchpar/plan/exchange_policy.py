"""What a patch strategy does at each kind of exchange point, as data. No torch, so that a strategy's name is cheap.

          fresh                  stale                             this rank's own only
halo      "fresh"                "stale"
moments   "fresh"                "stale", "corrected", "guarded"   "separate"
context   None                   a selection of keys and values
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from patchpar.errors import PlanError
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.kv_selection import AllRows, KVSelection
from patchpar.plan.resync import Resync
from patchpar.plan.scalars import is_number, is_whole

Moments = Literal["fresh", "corrected", "guarded", "stale", "separate"]
Text = Literal["split", "whole"]
GroupNorm = Literal["corrected", "guarded", "stale", "separate", "sync"]
Correction = Literal["affine", "linear", "none"]
BITS = (16, 8, 4)
TEXTS: tuple[Text, ...] = ("split", "whole")
CORRECTIONS: tuple[Correction, ...] = ("affine", "linear", "none")
GROUP_NORMS: dict[GroupNorm, Moments] = {
    "corrected": "corrected",
    "guarded": "guarded",
    "stale": "stale",
    "separate": "separate",
    "sync": "fresh",
}
"""The four variants of group norm that DistriFusion compares (arXiv:2402.19481, figure 9), and "guarded", ours."""
LEAST_VARIANCE = {"corrected": 0.0, "guarded": 0.3}
"""Least corrected variance, as a fraction of this rank's own. The paper refuses negative variances only, but a barely
positive one scales a whole group up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleKV:
    """Which stale keys and values are attended to, and how they are sent.

    `bits` below 16: the difference to what the receiver holds is sent, quantised. `narrow_to`: the receiver attends to
    this selection only. `extrapolated`: linearly from the last two steps. `correction`: what the owner sends fresh, see
    `patchpar.shard.stale.correction`.
    """

    selection: KVSelection = field(default_factory=AllRows)
    bits: int = 16
    narrow_to: KVSelection | None = None
    extrapolated: bool = False
    correction: Correction = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPartials:
    """Attention to other ranks' tokens is cached, and recomputed in every `refresh`-th step of each layer."""

    refresh: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePolicy:
    """What a strategy does at its exchange points. `name`: in verification results and reports.

    The first `warmup_steps` denoising steps are exact; None: all. `published`: halos and moments are sent to all ranks,
    keys and values are joined by copying, and variances of stale moments are unbiased, as in DistriFusion's code.
    `bucket`: how many small messages are sent together. `keys`: the exchange of fresh keys and values. `text` of joint
    attention: "split" between ranks as the image is, or "whole", so that each rank computes all of it.
    """

    name: str = "exact"
    warmup_steps: int | None = None
    halo: Literal["fresh", "stale"] = "fresh"
    moments: Moments = "fresh"
    context: StaleKV | CachedPartials | None = None
    keys: AttentionMode = field(default_factory=AttentionMode)
    published: bool = False
    bucket: int = 16
    resync: Resync | None = None
    text: Text = "split"

    @property
    def remembers(self) -> bool:
        """Whether stale values are ever used."""
        return self.warmup_steps is not None

    def frozen(self) -> "ExchangePolicy":
        """Return the policy without fresh values, so that nothing has to be sent after the exact steps."""
        moments: Moments = "stale" if self.moments == "fresh" else self.moments
        return replace(self, halo="stale", moments=moments)


def check_warmup(name: str, steps: object) -> None:
    """Raise PlanError unless `steps` is a valid number of warm-up steps."""
    if not is_whole(steps):
        raise PlanError(
            f"{name}: warmup_steps={steps!r}: the first step has no stale values to use, so at least 1 step is "
            "exact; with as many as there are steps, all are"
        )


def check_fraction(name: str, option: str, value: object) -> None:
    """Raise PlanError unless `value` is a fraction of a neighbour's rows."""
    if not is_number(value, 0, 1) or value == 0:
        raise PlanError(f"{name}: {option}={value!r}: it is a fraction of a neighbour's rows, above 0 and at most 1")


def check_count(name: str, option: str, value: object) -> None:
    """Raise PlanError unless `value` is a whole number of at least 1."""
    if not is_whole(value):
        raise PlanError(f"{name}: {option}={value!r}: it is a whole number of at least 1")


def check_choice(name: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise PlanError unless `value` is one of `choices`."""
    if value not in choices:
        raise PlanError(f"{name}: {option}={value!r}: use {', '.join(map(str, choices))}")
