"""Protect workers from processes that are forked from the one that started them, which must not use them.

A child's copy of a descriptor keeps a connection open: workers would consider a killed caller alive as long as one of
its children runs. So a child closes its copies at once. It also replaces locks, since a lock that another thread held
at the fork is never released in the child.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

from patchpar.errors import LaunchError


class Forkable(Protocol):
    """An object that holds descriptors or locks."""

    def after_fork(self) -> None:
        """In a forked child: close copied descriptors and replace locks, without any effect on the parent."""


class _Forks:
    """The objects to change in a forked child, and the lock that is held while such objects are created."""

    def __init__(self) -> None:
        self.making = threading.RLock()
        self._known: weakref.WeakSet[Forkable] = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
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
    """Call `thing.after_fork` in every process that is forked from this one while `thing` exists."""
    _FORKS.add(thing)


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Block forks of other threads while descriptors are created that are not yet registered for `after_fork`."""
    with _FORKS.making:
        yield


def check_owner(pid: int) -> None:
    """Raise LaunchError unless this process is `pid`, which started the workers."""
    if os.getpid() != pid:
        raise LaunchError(
            f"these workers belong to process {pid}; process {os.getpid()} was forked from it and cannot use them: "
            "create a new pipeline (or executor) in it, or start it with the 'spawn' method"
        )
