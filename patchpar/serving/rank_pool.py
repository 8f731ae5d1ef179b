"""Which ranks of a server work, are free, or have lost their process."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Literal

RankState = Literal["free", "busy", "lost"]


class RankPool:
    """The ranks of one server. The queue starts no more calls than there are ranks for.

    `slow` returns ranks that are taken after all others.
    """

    def __init__(self, count: int, slow: Callable[[], Collection[int]] = tuple) -> None:
        self._slow = slow
        self._states: list[RankState] = ["free"] * count
        self._lost: set[int] = set()
        self._lock = threading.Lock()

    @property
    def states(self) -> tuple[RankState, ...]:
        """What each rank does. A lost one works on nothing, or on being replaced."""
        with self._lock:
            return tuple("lost" if rank in self._lost else state for rank, state in enumerate(self._states))

    @property
    def usable(self) -> int:
        """Number of ranks that are not lost."""
        return len(self._states) - len(self._lost)

    @property
    def lost(self) -> tuple[int, ...]:
        """The lost ranks."""
        with self._lock:
            return tuple(sorted(self._lost))

    @contextmanager
    def taken(self, count: int, *, lost_first: bool = False) -> Iterator[tuple[int, ...]]:
        """Take so many free ranks, the first ones that are not lost or slow; with `lost_first` those that are lost."""
        slow = self._slow()
        with self._lock:
            free = [rank for rank, state in enumerate(self._states) if state == "free"]
            assert len(free) >= count, "the queue starts a job when its devices are free"
            best_first = sorted(free, key=lambda rank: ((rank in self._lost) != lost_first, rank in slow))
            found = tuple(sorted(best_first[:count]))
            self._set(found, "busy")
        try:
            yield found
        finally:
            with self._lock:
                self._set(found, "free")

    def lose(self, ranks: tuple[int, ...]) -> None:
        """Note that a call on these ranks has failed with its workers."""
        with self._lock:
            self._lost |= set(ranks)

    def restore(self, ranks: tuple[int, ...]) -> None:
        """Note that a call on these ranks has ended well."""
        with self._lock:
            self._lost -= set(ranks)

    def _set(self, ranks: tuple[int, ...], state: RankState) -> None:
        for rank in ranks:
            self._states[rank] = state
