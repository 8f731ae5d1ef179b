"""When a step of a stale strategy is made synchronous: the same decision on all ranks. No torch.

Each rank knows without extra cost how far its own keys and values have changed since the previous step. The sums are
sent with the prediction, so that every rank has the same numbers and takes the same decision for the next step.

Ours: docs/stale-patch.md. Error-driven refreshes are known from caches of steps, as in TeaCache (arXiv:2411.19108).
"""

import math
from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_number

DB_AT_FULL_DRIFT = {"none": 21.0, "affine": 30.0, "linear": 40.0}
"""PSNR in dB of an image whose stale steps all had a relative drift of 1, by correction; half the drift is 6 dB more.
Fitted on the embedded model, where keys move by 6 % a step in 20 steps and by 15 % in 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """`quality`: least PSNR against exact, in dB. `budget`: mean bytes sent per step. `correction`: of stale keys."""

    quality: float | None = None
    budget: float | None = None
    correction: str = "none"

    def limit(self) -> float:
        """Return the relative drift above which stale keys would cost more than `quality` allows."""
        return math.inf if self.quality is None else 10 ** ((DB_AT_FULL_DRIFT[self.correction] - self.quality) / 20)


def check_resync(name: str, quality: object, budget: object) -> None:
    """Raise PlanError unless at most one of the two is given, and it is a number above 0."""
    if quality is not None and budget is not None:
        raise PlanError(f"{name}: quality={quality!r} and budget={budget!r}: give only one of them")
    for option, value in (("quality", quality), ("budget", budget)):
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            unit = "a PSNR in dB" if option == "quality" else "MiB per step"
            raise PlanError(f"{name}: {option}={value!r}: it is {unit}, a number above 0")


@dataclass(slots=True)
class ResyncDecider:
    """Decides for one image and one denoiser call of each step."""

    rules: Resync
    spent: float = 0.0
    evaluations: int = 0
    full_bytes: float = 0.0  # of a synchronous step
    most_drift: float = 0.0

    def next_is_fresh(self, drift: float, sent: float, *, fresh: bool, calls: int = 1) -> bool:
        """Whether the next step is fresh, after one of relative `drift` and `sent` bytes; the same on all ranks.

        `calls`: how many a step has, each with a decider and an equal share of the budget.
        """
        self.spent, self.evaluations = self.spent + sent, self.evaluations + 1
        if fresh:
            self.full_bytes = max(self.full_bytes, sent)
        if self.rules.budget is not None:
            return self._affordable(drift, self.rules.budget / calls)
        unknown = self.evaluations == 1 and drift == 0  # nothing to compare with yet, and early steps change most
        return (unknown and self.rules.quality is not None) or drift > self.rules.limit()

    def _affordable(self, drift: float, budget: float) -> bool:
        """Return whether `budget` covers a synchronous step, and the drift is not small relative to the largest."""
        self.most_drift = max(drift, 0.9 * self.most_drift)
        left = budget * (self.evaluations + 1) - self.spent
        return left >= self.full_bytes and drift >= 0.5 * self.most_drift
