"""Ranks that a lost one takes along are started anew together with it, once, and are not waited for before."""

import os
import signal
from collections.abc import Callable

import pytest

from patchpar.errors import WorkerDied
from patchpar.launch.local import LocalExecutor
from tests.launch.conftest import PLAIN, all_gone

WORLD = 3
START_SECONDS = 120.0  # the default is ten minutes, for which a call would hang


def kill(ranks: LocalExecutor) -> None:
    victim = ranks.pids[1]
    os.kill(victim, signal.SIGKILL)
    assert all_gone([victim])


def crash(ranks: LocalExecutor) -> None:
    """In a call of its own, so that the others are idle."""
    with pytest.raises(WorkerDied):
        ranks.call("crash", 1, "SIGKILL", ranks=(1,))


def release(ranks: LocalExecutor) -> None:
    ranks.release(1)
    ranks.take_back(1)


def begin(ranks: LocalExecutor) -> None:
    """The lost one's new process is begun before the call that needs it."""
    kill(ranks)
    ranks.start()


@pytest.mark.parametrize("lose", [kill, crash, release, begin])
@pytest.mark.parametrize("one_by_one", [False, True], ids=["one group", "parts of one state"])
def test_ranks_that_a_lost_one_takes_along_are_started_with_it(
    lose: Callable[[LocalExecutor], None], one_by_one: bool
) -> None:
    with LocalExecutor(["cpu"] * WORLD, PLAIN, start_timeout=START_SECONDS, one_by_one=one_by_one) as ranks:
        ranks.call("load", "parts of a model", replay=True, divides=True)
        for _ in range(2):  # also those that have repeated the call
            before = set(ranks.pids)
            lose(ranks)
            assert ranks.call("what_is_loaded") == [["parts of a model"]] * WORLD
            after = ranks.pids
            assert before.isdisjoint(after)
            assert ranks.call("rank") == list(range(WORLD))
            assert ranks.pids == after, "they are not started again for the next call"


def test_a_rank_that_ends_before_the_first_call_takes_the_others_along() -> None:
    with LocalExecutor(["cpu"] * WORLD, PLAIN, start_timeout=START_SECONDS) as ranks:
        ranks.start()
        kill(ranks)
        assert ranks.call("rank") == list(range(WORLD))
        after = ranks.pids
        assert ranks.call("rank") == list(range(WORLD))
        assert ranks.pids == after
