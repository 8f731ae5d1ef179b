"""What becomes of workers in a process that is forked from the one that started them: nothing. They are not its own.

A child's copy of a descriptor keeps a connection open, so that workers would take a caller that has been killed for
alive as long as one of its children lives. So a child closes its copies at once. A lock that another thread held at the
moment of the fork is never released in the child, so that it gets new ones.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

from patchpar.errors import LaunchError


class Forkable(Protocol):
    """Something that holds descriptors or locks."""

    def after_fork(self) -> None:
        """In a child that was forked: close copies of descriptors, take new locks. The parent's must not notice."""


class _Forks:
    """All that a child has to change, and the lock without which nothing may be made that is still unknown here."""

    def __init__(self) -> None:
        self.making = threading.RLock()
        self._known: weakref.WeakSet[Forkable] = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):  # and not on Windows, where nothing forks
            lock = self.making
            os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=self._begin)

    def add(self, thing: Forkable) -> None:
        with self.making:
            self._known.add(thing)

    def _begin(self) -> None:
        self.making.release()
        for thing in list(self._known):
            thing.after_fork()


_FORKS = _Forks()


def change_in_children(thing: Forkable) -> None:
    """Have `thing.after_fork` called in every process that is forked from this one, as long as it lives."""
    _FORKS.add(thing)


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """While open, other threads that fork wait: descriptors are made that nobody would close in a child."""
    with _FORKS.making:
        yield


def check_owner(pid: int) -> None:
    """Raise LaunchError in any process but `pid`, which has made the workers."""
    if os.getpid() != pid:
        raise LaunchError(
            f"these workers belong to process {pid}; this one ({os.getpid()}) was forked from it and cannot use them: "
            "make a new pipeline (or executor) here, or start the process by 'spawn'"
        )
