"""Ranks of a job that compute more slowly than the others, from their own seconds of each denoiser call.

Ranks of one plan do the same work in every call, so that one that differs stands out. Sums over a few calls are
compared, since a rank of axis `cfg` may make every second call only. Waits on a GPU are on its stream, where the
process does not see them: on GPUs nothing is reported, nor of ranks with parts in a ratio. Ours.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from statistics import median

NUM_CALLS = 8
FACTOR = 1.3
log = logging.getLogger(__name__)


class StragglerMonitor:
    """Own seconds of the latest denoiser calls of each rank."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_CALLS))
        self._reported: set[int] = set()

    def reset(self) -> None:
        """Begin anew, with other ranks or another plan."""
        self._seconds.clear()

    def add(self, rank: int, seconds: float) -> None:
        """Count a call of a rank. One that is slower than the others is logged, once."""
        self._seconds[rank].append(seconds)
        slowness = self.slow.get(rank)
        if slowness is not None and rank not in self._reported:
            self._reported.add(rank)
            log.warning(
                "rank %d took %.2f times as long as the others in its last %d denoiser calls, without waits: its "
                "device is slower, or has other work",
                *(rank, slowness, NUM_CALLS),
            )

    @property
    def slow(self) -> dict[int, float]:
        """By rank, how many times as long as the median of the others it took, for those above FACTOR."""
        sums = {rank: sum(seconds) for rank, seconds in self._seconds.items() if len(seconds) == NUM_CALLS}
        found = {}
        for rank, own in sums.items():
            others = [seconds for other, seconds in sums.items() if other != rank]
            if others and own > FACTOR * median(others) > 0:
                found[rank] = own / median(others)
        return found
