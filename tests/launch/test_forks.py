"""What a forked child changes of what it has copies of."""

import gc
import os
import threading

import pytest

from patchpar.errors import LaunchError
from patchpar.launch import fork_guard as forks
from patchpar.launch.fork_guard import change_in_children, check_owner, no_fork


class Held:
    """Something with a lock."""

    def __init__(self):
        self.lock = threading.Lock()
        change_in_children(self)

    def after_fork(self):
        self.lock = threading.Lock()


def code_of_child(work):
    """What `work` returns in a child that is forked now."""
    child = os.fork()
    if child == 0:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_lock_that_another_thread_holds_is_free_in_a_child():
    kept, dropped = Held(), Held()
    del dropped
    gc.collect()
    holds, lets_go = threading.Event(), threading.Event()

    def hold():
        with kept.lock:
            holds.set()
            lets_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(60)
    own = kept.lock
    try:
        assert code_of_child(lambda: 5 if kept.lock.acquire(timeout=5) else 6) == 5
        assert code_of_child(lambda: 5 if own.acquire(timeout=0.1) else 6) == 6, "the old one stays as it was"
        assert kept.lock is own, "and so does the parent's"
    finally:
        lets_go.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_fork_waits_until_what_is_being_made_is_known():
    begins, order = threading.Event(), []

    def make():
        with no_fork():
            begins.set()
            threading.Event().wait(0.3)
            order.append("made")

    thread = threading.Thread(target=make)
    thread.start()
    begins.wait(60)
    assert code_of_child(lambda: len(order)) == 1
    thread.join()


def test_only_the_owner_may():
    check_owner(os.getpid())
    with pytest.raises(LaunchError, match=r"belong to process 1; process \d+ was forked from it and cannot use them"):
        check_owner(1)


def test_where_nothing_forks(monkeypatch):
    monkeypatch.delattr(os, "register_at_fork", raising=False)
    forks._Forks().add(Held())
