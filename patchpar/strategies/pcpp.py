"""Partially conditioned patch parallelism (PCPP, Dec 2024, arXiv:2412.02962).

As displaced patches, but attention covers only a band of each neighbour. The paper's abstract claims less traffic for
it; its code sends whole neighbours and slices. Here only the band is sent.

axis        patch
exchanged   halo rows, moments; keys and values of a band of each neighbour
when        stale, after a warm-up with fresh values
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from patchpar.plan.exchange_policy import (
    GROUP_NORMS,
    TEXTS,
    ExchangePolicy,
    GroupNorm,
    StaleKV,
    Text,
    check_choice,
    check_fraction,
    check_warmup,
)
from patchpar.plan.kv_selection import NearRows
from patchpar.plan.scalars import make_plain
from patchpar.strategies.strategy import PatchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class PartiallyConditioned(PatchStrategy):
    """Displaced bands that attend only to the nearest `fraction` of each neighbour's rows.

    `context`: "band" sends those rows; "paper" sends whole neighbours and uses the same rows, as the paper's code does.
    `warmup_steps`, `group_norm` and `text` as in DisplacedPatch; a text that is split would be most of what is sent.
    Raises PlanError.
    """

    name: ClassVar[str] = "pcpp"
    fraction: float = 0.3
    warmup_steps: int = 5
    context: Literal["band", "paper"] = "band"
    group_norm: GroupNorm = "corrected"
    text: Text = "whole"

    def __post_init__(self) -> None:
        make_plain(self)
        check_fraction(self.name, "fraction", self.fraction)
        check_warmup(self.name, self.warmup_steps)
        check_choice(self.name, "context", self.context, ("band", "paper"))
        check_choice(self.name, "group_norm", self.group_norm, tuple(GROUP_NORMS))
        check_choice(self.name, "text", self.text, TEXTS)

    @property
    def policy(self) -> ExchangePolicy:
        """Everything stale, keys of a band only."""
        band = NearRows(self.fraction)
        sent = StaleKV(selection=band) if self.context == "band" else StaleKV(selection=NearRows(1.0), narrow_to=band)
        moments = GROUP_NORMS[self.group_norm]
        return ExchangePolicy(
            name=self.name,
            warmup_steps=self.warmup_steps,
            halo="stale",
            moments=moments,
            context=sent,
            text=self.text,
        )
