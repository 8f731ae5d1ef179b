"""How queries and keys of different places meet in an exact step, as data. No torch, so that naming one is light."""

from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole, make_plain

WAYS = {
    "gather": "everybody's keys come to every place at once",
    "ring": "keys go round, one place at a time",
    "two-way-ring": "keys go half-way round in both directions",
    "token-ring": "queries go round, partial results come home",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMode:
    """One of `WAYS`, between groups of `ulysses` places that exchange tokens for heads. Raises PlanError."""

    way: str = "gather"
    ulysses: int = 1

    def __post_init__(self) -> None:
        make_plain(self)
        if self.way not in WAYS:
            raise PlanError(f"attention={self.way!r}: use {', '.join(WAYS)}")
        if not is_whole(self.ulysses):
            raise PlanError(f"ulysses={self.ulysses!r}: it is a number of ranks, at least 1")

    def check_group_size(self, group_ranks: int) -> None:
        """Raise PlanError unless groups of `ulysses` places are all there is."""
        if group_ranks % self.ulysses:
            fitting = ", ".join(str(each) for each in range(1, group_ranks + 1) if group_ranks % each == 0)
            raise PlanError(f"ulysses={self.ulysses} does not divide {group_ranks} ranks into groups: use {fitting}")
