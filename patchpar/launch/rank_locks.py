"""Which thread's call has which ranks: calls on the same ranks run one after another, in the order they were made."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from patchpar.errors import PlanError
from patchpar.launch.fork_guard import change_in_children
from patchpar.plan.scalars import is_whole, plain


class RankLocks:
    """A lock for each rank. A thread takes all that it needs at once, so that two threads never wait for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[int, int] = {}  # thread by rank
        self._queue: dict[object, frozenset[int]] = {}  # what threads wait for, the longest first
        change_in_children(self)

    def after_fork(self) -> None:
        """See Forkable. The threads that hold ranks do not exist in a child."""
        self._changed, self._owners, self._queue = threading.Condition(), {}, {}

    @property
    def are_held_here(self) -> bool:
        """Whether this thread holds ranks."""
        return threading.get_ident() in self._owners.values()

    @contextmanager
    def holding(self, ranks: Collection[int], check: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Wait until these ranks are free, and hold them meanwhile.

        `check` is called while it waits, after each `wake`; what it raises ends the wait.
        """
        wanted, own = frozenset(ranks), threading.get_ident()
        try:
            self._take(wanted, check)
            yield
        finally:  # also if an interrupt comes when they have just been taken
            with self._changed:
                for rank in wanted:
                    if self._owners.get(rank) == own:  # gone in a forked child
                        del self._owners[rank]
                self._changed.notify_all()

    def _take(self, wanted: frozenset[int], check: Callable[[], object]) -> None:
        ticket = object()
        with self._changed:
            self._queue[ticket] = wanted
            try:
                while not self._is_next(ticket):
                    check()
                    self._changed.wait()
                check()
                self._owners.update(dict.fromkeys(wanted, threading.get_ident()))
            finally:
                self._queue.pop(ticket, None)
                self._changed.notify_all()

    def _is_next(self, ticket: object) -> bool:
        """Whether all are free, and no thread that has waited longer wants one of them. Needs the lock."""
        taken = set(self._owners)
        for each, ranks in self._queue.items():
            if each is ticket:
                return taken.isdisjoint(ranks)
            taken |= ranks
        return False

    def wake(self) -> None:
        """Let all threads that wait call their `check`."""
        with self._changed:
            self._changed.notify_all()


def checked_ranks(ranks: object, world_size: int) -> tuple[int, ...]:
    """Return the ranks that a call names. Raises PlanError for a list that is empty, repeats one, or goes too far."""
    found = list(ranks) if isinstance(ranks, Sequence) and not isinstance(ranks, str) else []
    way_out = f"name some of the {world_size} ranks, 0 to {world_size - 1}, each once, such as ranks=(0,)"
    if world_size == 1:
        way_out = "leave it out: there is one rank"
    if not found or not all(is_whole(plain(rank), least=0) for rank in found):
        raise PlanError(f"ranks={ranks!r}: {way_out}")
    found = [int(rank) for rank in found]
    missing = [rank for rank in found if rank >= world_size]
    if missing:
        raise PlanError(f"ranks={ranks!r}: there is no rank {missing[0]}: {way_out}")
    if len(set(found)) < len(found):
        raise PlanError(f"ranks={ranks!r} repeats a rank: {way_out}")
    return tuple(found)
