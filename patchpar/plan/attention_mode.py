"""How queries of one rank attend to the keys of others in an exact step, as data. No torch, for a fast import."""

from dataclasses import dataclass, replace
from functools import cache

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole, make_plain

ALGORITHMS = {
    "gather": "all-gather of the keys",
    "ring": "keys are passed around a ring, one rank at a time",
    "two-way-ring": "keys are passed half-way around the ring in both directions",
    "token-ring": "queries are passed around the ring, partial results are returned",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMode:
    """One of `ALGORITHMS`, between groups of `ulysses` ranks that exchange tokens for heads. Raises PlanError.

    `overlap`, of gathered keys: attend to each rank's as they arrive and merge, so that computing hides some of the
    link's time, instead of to all of them at once. None: as the link is, see `on_link`.
    """

    algorithm: str = "gather"
    ulysses: int = 1
    overlap: bool | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if self.algorithm not in ALGORITHMS:
            raise PlanError(f"attention={self.algorithm!r}: use {', '.join(ALGORITHMS)}")
        if not is_whole(self.ulysses):
            raise PlanError(f"ulysses={self.ulysses!r}: it is a number of ranks, at least 1")

        if self.overlap not in (None, False, True):
            raise PlanError(f"overlap={self.overlap!r}: use True, False or None, which is as the link is")
        if self.overlap is not None and self.algorithm != "gather":
            raise PlanError(f"overlap={self.overlap} is for attention=gather: {self.algorithm} always overlaps")

    def on_link(self, *, overlap: bool) -> "AttentionMode":
        """Return the mode with `overlap` decided where it is open."""
        return _on_link(self, overlap=overlap) if self.overlap is None and self.algorithm == "gather" else self

    def check_group_size(self, group_ranks: int) -> None:
        """Raise PlanError unless `ulysses` divides the number of ranks."""
        if group_ranks % self.ulysses:
            fitting = ", ".join(str(each) for each in range(1, group_ranks + 1) if group_ranks % each == 0)
            raise PlanError(f"ulysses={self.ulysses} does not divide {group_ranks} ranks into groups: use {fitting}")


@cache  # every attention asks
def _on_link(mode: AttentionMode, *, overlap: bool) -> AttentionMode:
    return replace(mode, overlap=overlap)
