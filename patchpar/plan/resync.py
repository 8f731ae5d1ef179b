"""When a step is made synchronous again although stale values would do: decided by all ranks together. No torch.

Each rank knows for free how far its own keys and values have moved since the last step. The sums travel with the
prediction, so that every rank has the same numbers and takes the same decision for the next step.
"""

import math
from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_number

DB_AT_FULL_DRIFT = {"none": 21.0, "affine": 30.0, "linear": 40.0}
"""PSNR in dB of a picture whose stale steps all had a relative drift of 1, by what owners tell of it; half the drift is
6 dB more. Fitted on the embedded model, where keys move by 6 % a step in 20 steps and by 15 % in 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """`quality`: aim at this PSNR against exact, in dB. `budget`: bytes that a rank may send per step on average.

    `correction`: what owners tell of how their keys have changed.
    """

    quality: float | None = None
    budget: float | None = None
    correction: str = "none"

    def limit(self) -> float:
        """The relative drift above which stale keys would cost more than `quality` allows."""
        return math.inf if self.quality is None else 10 ** ((DB_AT_FULL_DRIFT[self.correction] - self.quality) / 20)


def check_resync(name: str, quality: object, budget: object) -> None:
    """Raise PlanError unless at most one of both is given, and it is a number above 0."""
    if quality is not None and budget is not None:
        raise PlanError(f"{name}: quality={quality!r} and budget={budget!r}: give one of them, the other follows")
    for option, value in (("quality", quality), ("budget", budget)):
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            unit = "a PSNR in dB" if option == "quality" else "MiB per step"
            raise PlanError(f"{name}: {option}={value!r}: it is {unit}, a number above 0")


@dataclass(slots=True)
class ResyncDecider:
    """Takes the decisions of one picture, for one guidance call."""

    rules: Resync
    spent: float = 0.0
    evaluations: int = 0
    full_bytes: float = 0.0  # of a synchronous step
    most_drift: float = 0.0

    def next_is_fresh(self, drift: float, sent: float, *, fresh: bool) -> bool:
        """Whether the next step is to be synchronous, after one that drifted by `drift` and sent `sent` bytes.

        All ranks pass the same numbers.
        """
        self.spent, self.evaluations = self.spent + sent, self.evaluations + 1
        if fresh:
            self.full_bytes = max(self.full_bytes, sent)
        if self.rules.budget is not None:
            return self._affordable(drift)
        unknown = self.evaluations == 1 and drift == 0  # nothing to compare with yet, and early steps go farthest
        return (unknown and self.rules.quality is not None) or drift > self.rules.limit()

    def _affordable(self, drift: float) -> bool:
        """Whether the budget so far leaves room for a synchronous step, and the drift is not small beside the most."""
        assert self.rules.budget is not None
        self.most_drift = max(drift, 0.9 * self.most_drift)
        left = self.rules.budget * (self.evaluations + 1) - self.spent
        return left >= self.full_bytes and drift >= 0.5 * self.most_drift
