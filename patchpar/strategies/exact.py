"""Exact patch parallelism: bands of a UNet's latent with fresh halo, moments, and keys and values.

The layout is DistriFusion's (Li et al., CVPR 2024, arXiv:2402.19481), whose "full sync" is not exact: its group norm
scales the variance by N/(N-1). Here moments merge exactly in fp32, and communication overlaps with computation: the
interior of a convolution and attention to our own keys run while the others' values are sent.

axis        patch: each rank owns a band of rows, or of columns where the image is wider than tall
exchanged   moments with raw edge rows (one round per norm-convolution pair), halo rows, keys and values (or queries)
when        fresh
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.scalars import make_plain
from patchpar.strategies.strategy import PatchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPatch(PatchStrategy):
    """Bands with fresh values everywhere: equal to one device within rounding.

    `attention`: "gather": all-gather of the keys; "ring" and "two-way-ring": keys are passed around a ring
    (arXiv:2310.01889); "token-ring": queries are (arXiv:2412.20501). `ulysses`: groups of this many neighbouring ranks
    exchange tokens for heads first (arXiv:2309.14509), and `attention` applies between the groups (USP,
    arXiv:2405.07719); the number of bands gives Ulysses alone. `overlap`, of "gather": attend to each rank's keys as
    they arrive, which hides some of a slow link's time, instead of to all of them at once; None: as the link is. Raises
    PlanError.
    """

    name: ClassVar[str] = "exact"
    attention: str = "gather"
    ulysses: int = 1
    overlap: bool | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        self.policy  # noqa: B018 - its parts validate themselves

    def check_group_size(self, group_ranks: int) -> None:
        """Raise PlanError unless `ulysses` divides the number of bands."""
        self.policy.keys.check_group_size(group_ranks)

    @property
    def policy(self) -> ExchangePolicy:
        """Everything fresh."""
        return ExchangePolicy(
            name=str(self), keys=AttentionMode(algorithm=self.attention, ulysses=self.ulysses, overlap=self.overlap)
        )
