"""Which ranks of a server work, are free, have lost their process, or are out of service."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from patchpar.plan.plan import Plan
from patchpar.serving.rank_pings import RankPings
from patchpar.serving.request_error import RequestError

RankState = Literal["free", "busy", "silent", "lost", "removed"]
AGAIN_SECONDS = 30.0
"""After which a rank that is still lost is to be replaced again: the first attempt may have failed."""


class RankPool:
    """The ranks of one server. The queue starts no more calls than there are ranks for.

    `slow` returns ranks that are taken after all others, and how many times as long as these they take. `pings`:
    which free ones do not answer. `clock` in seconds.
    """

    def __init__(
        self,
        count: int,
        pings: RankPings,
        slow: Callable[[], Mapping[int, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pings, self._slow, self._clock = pings, slow, clock
        self._is_busy = [False] * count
        self._lost: dict[int, float] = {}  # when
        self._removed: set[int] = set()
        self._lock = threading.Lock()

    @property
    def states(self) -> tuple[RankState, ...]:
        """What each rank does. A lost one works on nothing, or on being replaced."""
        with self._lock:
            return tuple(self._state_of(rank) for rank in range(len(self._is_busy)))

    def _state_of(self, rank: int) -> RankState:
        """Needs the lock."""
        if rank in self._removed:
            return "removed"
        if rank in self._lost:
            return "lost"
        if self._is_busy[rank]:
            return "busy"
        return "silent" if self._pings.is_silent(rank) else "free"

    def slowness(self, rank: int) -> float:
        """How many times as long as the others a rank takes; 1 for one that is not slow."""
        return self._slow().get(rank, 1.0)

    @property
    def in_service(self) -> int:
        """Number of ranks that are not removed."""
        return len(self._is_busy) - len(self._removed)

    def check(self, plan: Plan) -> None:
        """Raise RequestError for a plan of more ranks than are in service."""
        if plan.world_size > self.in_service:
            raise RequestError(
                f"plan {plan} takes {plan.world_size} devices, and {self.in_service} are in service: use a smaller one",
                param="plan",
            )

    @property
    def usable(self) -> int:
        """Number of ranks that work, or would."""
        return sum(state in ("free", "busy") for state in self.states)

    @property
    def lost(self) -> tuple[int, ...]:
        """The lost ranks."""
        with self._lock:
            return tuple(sorted(self._lost.keys() - self._removed))

    def is_overdue(self, rank: int) -> bool:
        """Whether a rank has been lost for so long that it is to be replaced again, and nobody is replacing it."""
        with self._lock:
            since = self._lost.get(rank)
            is_left = since is not None and rank not in self._removed and not self._is_busy[rank]
            return is_left and self._clock() - (since or 0.0) > AGAIN_SECONDS

    def is_idle(self, rank: int) -> bool:
        """Whether a rank has nothing to do, and has not been lost or removed."""
        with self._lock:
            return self._state_of(rank) in ("free", "silent")

    @contextmanager
    def taken(self, count: int, *, lost_first: bool = False) -> Iterator[tuple[int, ...]]:
        """Take so many free ranks, the first ones that are not lost or slow; with `lost_first` those that are lost."""
        slow = self._slow()
        with self._lock:
            free = [rank for rank, is_busy in enumerate(self._is_busy) if not is_busy and rank not in self._removed]
            assert len(free) >= count, "the queue starts a job when its devices are free"
            best_first = sorted(free, key=lambda rank: (*self._order(rank, lost_first=lost_first), rank in slow))
            found = tuple(sorted(best_first[:count]))
            for rank in found:
                self._is_busy[rank] = True
        try:
            yield found
        finally:
            with self._lock:
                for rank in found:
                    self._pings.note(rank)
                    self._is_busy[rank] = False

    def _order(self, rank: int, *, lost_first: bool) -> tuple[bool, bool]:
        return (rank in self._lost) != lost_first, self._pings.is_silent(rank)

    def lose(self, ranks: tuple[int, ...]) -> None:
        """Note that a call on these ranks has failed with its workers."""
        with self._lock:
            self._lost.update(dict.fromkeys(ranks, self._clock()))

    def restore(self, ranks: tuple[int, ...]) -> None:
        """Note that a call on these ranks has ended well."""
        with self._lock:
            for rank in ranks:
                self._lost.pop(rank, None)

    def remove(self, rank: int) -> None:
        """Take a rank out of service, which has nothing to do."""
        with self._lock:
            self._removed.add(rank)
            self._lost.pop(rank, None)

    def put_back(self, rank: int) -> None:
        """Put a rank into service again."""
        with self._lock:
            self._removed.discard(rank)
            self._pings.note(rank)
