"""Which of the others' values a place has, and how old they are."""

from __future__ import annotations

from dataclasses import dataclass

HALOS = ("fresh", "stale", "none")
MOMENTS = ("fresh", "corrected", "guarded", "stale", "separate")
CORRECTIONS = ("none", "affine", "linear")
CONTEXTS = ("fresh", "all", "band", "pooled", "partials", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPolicy:
    """A kind of exchange for each kind of layer; the first `warmup_steps` evaluations are synchronous and exact.

    halo      the neighbours' rows that a convolution reads: this step's, the last step's, or zeros
    moments   of a group norm. fresh: all places' of this step. stale: own of this step, others' of the last.
              corrected: all places' of the last step, moved by the change of the own. guarded: the same, and the own
              variance where that leaves less than 0.3 of it. separate: own only
    published variances of moments that are partly old are multiplied by N/(N - 1), N the values of a place's own group
    context   the others' keys and values. fresh: all of this step. Of the last step, `all`; `band`: of the two
              neighbours the nearest `fraction` of their rows; `pooled`: of the neighbours the nearest `band` of their
              rows, everything else averaged over `pool` x `pool` tokens; `partials`: all, but looked at only at every
              `refresh`-th evaluation. none: own only
    extrapolated   the others' keys and values that are old go on along the straight line through the last two
              evaluations, as far as this one's timestep is from the last (at most twice their distance)
    by_owners      of that line they go the part that they went in the evaluation before, at least seven tenths, since
              their owners extrapolate them before they know this one; and the correction is of what they have come to
    correction     what each place makes of its own change since the last evaluation, and others apply to what they
              have of it: a factor and a summand for each channel, or for each head a matrix where there are at least
              four tokens for each of its numbers; `none`
    frozen    after the synchronous evaluations nothing is sent any more, whatever is said above: a control. The last
              step is then the last synchronous one for ever, and partials are not looked at anew

    Raises ValueError for a name or number outside these.
    """

    halo: str = "fresh"
    moments: str = "fresh"
    published: bool = False
    context: str = "fresh"
    fraction: float = 0.3
    band: float = 0.1
    pool: int = 4
    refresh: int = 4
    extrapolated: bool = False
    by_owners: bool = False
    correction: str = "none"
    warmup_steps: int = 1
    frozen: bool = False

    def __post_init__(self) -> None:
        known_names = {"halo": HALOS, "moments": MOMENTS, "context": CONTEXTS, "correction": CORRECTIONS}
        for name, known in known_names.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}")
        self._check_numbers()
        if (self.extrapolated or self.correction != "none") and self.context not in ("all", "band", "pooled"):
            raise ValueError(f"extrapolated, corrected: with context={self.context!r} nothing old is attended to anew")
        if self.by_owners and not (self.extrapolated and self.correction != "none"):
            raise ValueError("by_owners: without extrapolation and correction it makes no difference who extrapolates")
        if self.warmup_steps < int(self.needs_past):
            raise ValueError(f"warmup_steps={self.warmup_steps}: the first evaluation has no past, so at least 1")

    def _check_numbers(self) -> None:
        for name in ("fraction", "band"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not in (0, 1]")
        for name in ("pool", "refresh"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is less than 1")

    @property
    def needs_past(self) -> bool:
        """Whether anything of the last step is used."""
        own_step_only = self.halo != "stale" and self.moments in ("fresh", "separate")
        return self.frozen or not (own_step_only and self.context in ("fresh", "none"))
