"""Ranks that compute more slowly than the others, from their own seconds of each denoiser call of a job.

Ranks of one plan do the same work in every call, so that one that differs stands out. Sums over a few calls are
compared, since a rank of axis `cfg` may make every second call only. Waits on a GPU are on its stream, where the
process does not see them: on GPUs nothing is reported, nor of ranks with parts in a ratio. A rank that was slow is left
out of the next jobs for some minutes, where these may choose their ranks. Ours.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

NUM_CALLS = 8
FACTOR = 1.3
LEFT_OUT_SECONDS = 300.0
"""How long a slow rank is left out: what else its device had to do may be over by then."""
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
    def judged(self) -> frozenset[int]:
        """Ranks of which NUM_CALLS calls are known, if those of others are, too."""
        known = frozenset(rank for rank, seconds in self._seconds.items() if len(seconds) == NUM_CALLS)
        return known if len(known) > 1 else frozenset()

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


class SlowRanks:
    """Ranks that were slow in the latest jobs. `clock`: seconds, of any beginning."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[int, float] = {}
        self._slowness: dict[int, float] = {}

    def learn(self, monitor: StragglerMonitor) -> None:
        """Take over what a job has shown: which of its ranks were slow, and which are no longer."""
        slow = monitor.slow
        self._slowness.update(slow)  # first: other threads read it of those that are left out
        for rank in monitor.judged - slow.keys():
            self._until.pop(rank, None)
        self._until.update(dict.fromkeys(slow, self._clock() + LEFT_OUT_SECONDS))

    @property
    def now(self) -> dict[int, float]:
        """By rank, how many times as long as the others those took that are left out at this time."""
        time_now = self._clock()
        return {rank: self._slowness[rank] for rank, until in sorted(self._until.items()) if time_now < until}

    def last(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return `ranks` in their order, but slow ones behind all others."""
        slow = self.now
        return tuple(sorted(ranks, key=lambda rank: rank in slow))

    def without(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of `ranks` that are not slow; all of them if every one is."""
        slow = self.now
        return tuple(rank for rank in ranks if rank not in slow) or tuple(ranks)

    def listed(self, ranks: Sequence[int]) -> str:
        """Return which of `ranks` are left out, in words to follow the reason of a plan; empty if none is."""
        found = [f"rank {rank} ({slowness:.2f} times as slow)" for rank, slowness in self.now.items() if rank in ranks]
        return f"; without {', '.join(found)}" if found and len(found) < len(ranks) else ""
