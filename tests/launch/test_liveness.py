"""Slow is not hung: ranks that work are waited for, ranks that stand still are not, and nothing lasts for ever."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from patchpar.errors import WorkerHung
from patchpar.launch import hang_detection as progress
from patchpar.launch.local import LocalExecutor
from tests.breadth import first_of
from tests.launch.conftest import DEADLINE, PLAIN

LONGER = 1.5 * DEADLINE


@pytest.fixture(scope="module")
def single() -> Iterator[LocalExecutor]:
    with LocalExecutor(["cpu"], PLAIN, deadline=DEADLINE) as executor:
        yield executor


def test_a_long_kernel_without_a_mark_is_waited_for(single):
    single.call("rank")
    before = single.pids
    assert single.call("burn", LONGER) == ["done"]
    assert single.pids == before


def test_the_same_time_asleep_is_not(single):
    with pytest.raises(WorkerHung, match=r"neither made progress nor worked for too long \(limit 2 s\)"):
        single.call("sleep", LONGER)


def test_a_rank_that_waits_for_a_slow_one_waits_beyond_the_deadline(pool):
    """Nor does its own transport give up: who is late can only be seen from outside."""
    before = pool.call("rank") and pool.pids
    assert pool.call("exchange", 1, LONGER) == [1.0, 0.0]
    assert pool.pids == before


def test_a_slow_rank_that_is_stopped_is_named_and_not_the_one_that_waits(pool):
    pool.call("rank")
    stopped = []

    def stop(report):
        stopped.append(pool.pids[0])
        os.kill(pool.pids[0], signal.SIGSTOP)

    with pytest.raises(WorkerHung, match=r"rank 0 \(cpu, pid \d+\) does not answer") as caught:
        pool.call("exchange", 0, 600, on_start=stop)
    assert caught.value.rank == 0
    assert "--deadline" in str(caught.value)
    assert stopped


def test_ranks_that_wait_for_one_another_are_told_apart_from_slow_ones(pool):
    with pytest.raises(WorkerHung, match=r"all ranks have waited for one another for too long \(limit 2 s\)") as caught:
        pool.call("exchange", None, 0)
    assert "last exchange point 'an exchange'" in str(caught.value)


@pytest.mark.parametrize("how", first_of(["spin", "spin_on_gpu"], "spin"))
def test_spinning_for_another_rank_is_no_work(single, how):
    with pytest.raises(WorkerHung, match="waited for one another"):
        single.call(how, 600)


def test_an_endless_loop_ends(single, monkeypatch):
    monkeypatch.setattr(progress, "WORK_TIMES", 1.25)
    single.call("rank")
    start = time.monotonic()
    with pytest.raises(WorkerHung, match=r"too long without reaching another exchange point \(limit 2\.5 s\)"):
        single.call("burn", 600)
    assert time.monotonic() - start > 1.25 * DEADLINE
