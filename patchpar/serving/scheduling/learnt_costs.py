"""Seconds of denoising steps by shape, plan and number of devices, learnt from calls and kept for the next server.

What has not been measured is guessed from the nearest that has, of any plan: seconds grow with the pixels, and fall
with the number of devices to the power of 0.7, the speed-up of 2.6 on four that this package's predictions have for
large images (docs/figures/gpu-predict.md). A measurement replaces the guess.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.serving.scheduling.state import StepCosts
from patchpar.shard.verification_cache import VerificationCache

SPEED_UP = 0.7
"""Power of the number of devices."""
UNKNOWN_SECONDS = 1.0
"""Of a step on one device where nothing has been measured yet."""
WINDOW = 8
"""So many calls decide: older ones fade."""
MOST = 1024
"""So many shapes, plans and numbers of devices are known; those that have been seen last. Clients choose them."""
NAME = "step_seconds"


@dataclass(frozen=True, slots=True)
class CallShape:
    """What decides how long a step takes: pixels of all frames, guidance branches, and the plan.

    `plan`: as text; "" for the one that is chosen for the number of devices.
    """

    pixels: int
    branches: int = 1
    plan: str = ""

    @property
    def size(self) -> int:
        """Pixels of all branches."""
        return self.pixels * self.branches


class LearntCosts:
    """`cache` and `facts`: where measurements are kept, and of what they are: the model, its devices and its dtype."""

    def __init__(self, cache: VerificationCache | None = None, facts: Mapping[str, Any] | None = None) -> None:
        self._cache, self._facts = cache, dict(facts or {})
        self._lock = threading.Lock()
        self._means: dict[tuple[CallShape, int], tuple[float, int]] = {}
        if cache is not None:
            self._means = cache.find(cache.key(self._facts), NAME, _read) or {}

    def observe(self, shape: CallShape, degree: int, steps: int, seconds: float) -> None:
        """Learn from a call with so many steps on so many devices, which took `seconds`."""
        if steps < 1 or not 0 < seconds < float("inf"):
            return
        with self._lock:
            mean, count = self._means.pop((shape, degree), (0.0, 0))  # and in again, as the latest
            count = min(count + 1, WINDOW)
            self._means[shape, degree] = mean + (seconds / steps - mean) / count, count
            while len(self._means) > MOST:
                del self._means[next(iter(self._means))]
            kept = dict(self._means)
        if self._cache is not None:
            self._cache.remember(self._cache.key(self._facts), self._facts, **{NAME: _written(kept)})

    def is_measured(self, shape: CallShape, degree: int) -> bool:
        """Whether a call of this shape on so many devices has been measured."""
        return (shape, degree) in self._means

    def costs(self, shape: CallShape, degrees: Sequence[int]) -> StepCosts:
        """Return the seconds of a step of a shape on each number of devices."""
        with self._lock:
            known = {key: mean for key, (mean, _) in self._means.items()}
        return StepCosts(steps={degree: _seconds(known, shape, degree) for degree in degrees})


def _seconds(known: Mapping[tuple[CallShape, int], float], shape: CallShape, degree: int) -> float:
    """Return what was measured, or a guess from what is nearest: the size, then the plan and the number of devices."""
    if (shape, degree) in known:
        return known[shape, degree]
    if not known:
        return float(UNKNOWN_SECONDS * degree**-SPEED_UP)
    nearest = min(
        known,
        key=lambda key: (_distance(key[0].size, shape.size), key[0].plan != shape.plan, _distance(key[1], degree)),
    )
    return float(known[nearest] * (shape.size / nearest[0].size) * (nearest[1] / degree) ** SPEED_UP)


def _distance(first: int, second: int) -> float:
    return max(first, second) / min(first, second)


def _written(means: Mapping[tuple[CallShape, int], tuple[float, int]]) -> list[list[float | str]]:
    return [[shape.pixels, shape.branches, shape.plan, degree, *found] for (shape, degree), found in means.items()]


def _read(rows: Any) -> dict[tuple[CallShape, int], tuple[float, int]]:
    found = {}
    for pixels, branches, *plan, degree, mean, count in rows:  # without a plan in files of earlier servers
        if min(int(pixels), int(branches), int(degree), int(count)) < 1 or not 0 < float(mean) < float("inf"):
            raise ValueError(f"{pixels}, {branches}, {degree}, {mean}, {count}")
        shape = CallShape(int(pixels), int(branches), "".join(map(str, plan)))
        found[shape, int(degree)] = float(mean), int(count)
    return found
