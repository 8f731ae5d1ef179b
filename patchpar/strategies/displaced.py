"""Displaced patch parallelism (DistriFusion, Li et al., CVPR 2024, arXiv:2402.19481).

Inputs of successive denoising steps are similar, so a rank uses stale values of the others, which have a whole step to
arrive. The first steps are exact.

axis        patch: each rank owns a band of rows, or of columns where the image is wider than tall
exchanged   halo rows (to the neighbours), moments, keys and values (to all)
when        stale, sent as soon as they are computed; keys and values of a transformer's text fresh
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from patchpar.plan.exchange_policy import (
    GROUP_NORMS,
    TEXTS,
    ExchangePolicy,
    GroupNorm,
    StaleKV,
    Text,
    check_choice,
    check_warmup,
)
from patchpar.plan.scalars import make_plain
from patchpar.strategies.strategy import PatchStrategy

PAPER_BUCKET = 60  # tensors that its code sends together


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplacedPatch(PatchStrategy):
    """Bands with stale halo, moments, keys and values.

    `warmup_steps`: exact steps at the beginning, the first included; the paper's default of 4 after the first is 5.
    `group_norm`: "corrected" adds the change of our moments to the stale moments of the whole; "guarded" refuses a
    corrected variance far below ours; "stale" merges ours with the stale ones of others; "separate" uses ours alone;
    "sync" uses fresh moments of all.
    `preset`: "paper" computes and sends what the paper's code does: the variance of stale moments times N/(N - 1),
    halos to all ranks, keys joined by copying. Its warm-up steps have that factor too and so are not exact; ours are.
    `text` of a transformer with joint attention: "split" between ranks, its keys and values fresh; or computed "whole"
    by each rank, so that no rank waits for it. Raises PlanError.
    """

    name: ClassVar[str] = "displaced"
    warmup_steps: int = 5
    group_norm: GroupNorm = "corrected"
    preset: Literal["paper"] | None = None
    text: Text = "split"

    def __post_init__(self) -> None:
        make_plain(self)
        check_warmup(self.name, self.warmup_steps)
        check_choice(self.name, "group_norm", self.group_norm, tuple(GROUP_NORMS))
        check_choice(self.name, "preset", self.preset, (None, "paper"))
        check_choice(self.name, "text", self.text, TEXTS)

    @property
    def policy(self) -> ExchangePolicy:
        """Everything stale."""
        found = ExchangePolicy(
            name=self.name,
            warmup_steps=self.warmup_steps,
            halo="stale",
            moments=GROUP_NORMS[self.group_norm],
            context=StaleKV(),
            text=self.text,
        )
        return replace(found, published=True, bucket=PAPER_BUCKET) if self.preset else found
