"""Calls on some of the ranks: beside each other, and beside ranks that die, stop or raise."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchpar.errors import CallCancelled, LaunchError, PlanError, WorkerDied, WorkerError, WorkerHung
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from tests.launch.conftest import PLAIN, all_gone

WORLD, DEADLINE, SECONDS = 4, 2.0, 20.0
LAZY = "tests.launch.lazy:LazyEngine"


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalExecutor]:
    with LocalExecutor(["cpu"] * WORLD, LAZY, deadline=DEADLINE, one_by_one=True) as executor:
        executor.call("load", "the model", replay=True)
        yield executor


@pytest.fixture
def replaces(pool: LocalExecutor) -> Iterator[list[int]]:
    """Checks that only the ranks that a test names are new after it, and all have loaded what the old ones had."""
    before, named = pool.call("rank") and pool.pids, list[int]()
    yield named
    assert pool.call("add_up", 1, 3) == [10.0] * WORLD
    assert pool.call("what_is_loaded") == [["the model"]] * WORLD
    assert [rank for rank in range(WORLD) if pool.pids[rank] != before[rank]] == named


def total(ranks: Any, value: int) -> list[float]:
    return [float(sum(value + rank for rank in ranks))] * len(ranks)


def test_a_change_that_fails_on_one_rank_is_kept_by_none(pool: LocalExecutor, replaces: list[int]) -> None:
    with pytest.raises(WorkerError, match=r"rank 2 .*not on this one"):
        pool.call("load_on_others", "another model", 2, replay=True)
    replaces.extend(range(WORLD))


def test_a_change_that_fails_half_way_on_all_ranks_is_kept_by_none(pool: LocalExecutor, replaces: list[int]) -> None:
    """Else one that is replaced later would be another one than the others."""
    with pytest.raises(ValueError, match="half of it"):
        pool.call("load_half", "another model", replay=True)
    replaces.extend(range(WORLD))


def test_a_callback_cannot_release_a_rank_of_its_own_call(pool: LocalExecutor, replaces: list[int]) -> None:
    """It would wait for the end of the call, and the call for it."""
    with pytest.raises(LaunchError, match="such as a callback, cannot release a rank: do so when the current call has"):
        pool.call("count", 1, on_event=lambda rank, event: pool.release(1))
    assert pool.in_service == tuple(range(WORLD))
    replaces.extend(range(WORLD))


def test_ranks_of_a_call_are_those_it_names_in_its_order(pool: LocalExecutor) -> None:
    assert pool.call("rank", ranks=(3, 1)) == [3, 1]
    assert pool.call("ranks", ranks=[np.int64(2), 0]) == [(2, 0)] * 2
    assert pool.call("ranks") == [(0, 1, 2, 3)] * WORLD


def test_the_first_of_them_asks(pool: LocalExecutor) -> None:
    asked = []
    assert (
        pool.call("converse_in_turn", 2, ranks=(3, 1), on_ask=lambda each: asked.append(each) or each)
        == [[(3, 0), (3, 1)]] * 2
    )
    assert asked == [(3, 0), (3, 1)]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((), r"ranks=\(\): name some of the 4 ranks, 0 to 3, each once"),
        ((0, 4), r"ranks=\(0, 4\): there is no rank 4: name some of the 4 ranks, 0 to 3"),
        ((0, -1), r"ranks=\(0, -1\): name some"),
        ((1, 2, 1), r"ranks=\(1, 2, 1\) repeats a rank: .*each once"),
        ((0, True), r"ranks=\(0, True\): name some"),
        ("01", r"ranks='01': name some"),
        (2, r"ranks=2: name some of the 4 ranks.*such as ranks=\(0,\)"),
        ({0, 1}, r"ranks=\{0, 1\}: name some"),
    ],
)
def test_ranks_that_cannot_be(pool: LocalExecutor, ranks: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        pool.call("rank", ranks=ranks)


def test_the_only_rank_can_be_named() -> None:
    with InlineExecutor("cpu", PLAIN) as executor:
        assert executor.call("rank", ranks=(0,)) == [0]
        with pytest.raises(PlanError, match=r"ranks=\(1,\): there is no rank 1: leave it out"):
            executor.call("rank", ranks=(1,))


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((3, 1), (0, 2)), ((2,), (1,), (0,), (3,))])
def test_calls_on_different_ranks_run_at_the_same_time(pool: LocalExecutor, groups: Any) -> None:
    """None of them goes on before all have begun."""
    begun, senders = threading.Barrier(len(groups), timeout=SECONDS), {}

    def one(ranks: tuple[int, ...]) -> list[float]:
        def on_event(rank: int, event: object) -> None:
            if rank == ranks[0]:
                begun.wait()
                for each in ranks:
                    senders[ranks](each, "go on")

        return pool.call(
            "meet", 10, ranks=ranks, on_event=on_event, on_start=lambda send: senders.update({ranks: send})
        )

    with ThreadPoolExecutor(len(groups)) as threads:
        assert list(threads.map(one, groups)) == [total(ranks, 10) for ranks in groups]


def until_waiting(pool: LocalExecutor, calls: int) -> None:
    """Until so many calls wait for ranks."""
    give_up = time.monotonic() + SECONDS
    while len(pool._locks._queue) != calls:
        assert time.monotonic() < give_up
        time.sleep(0.01)


class OpenCall:
    """A call on some ranks that lasts until it is ended; it has begun when this is made."""

    def __init__(self, pool: LocalExecutor, threads: ThreadPoolExecutor, ranks: tuple[int, ...]) -> None:
        begun, self._senders, self._ranks = threading.Event(), list[Any](), ranks
        events = {"on_event": lambda *_: begun.set(), "on_start": self._senders.append}
        self.call = threads.submit(pool.call, "meet", 0, ranks=ranks, expected=SECONDS, **events)
        assert begun.wait(SECONDS)

    def end(self) -> list[float]:
        for rank in self._ranks:
            self._senders[0](rank, "go on")
        return self.call.result(SECONDS)


def test_calls_with_a_rank_in_common_take_turns_in_order(pool: LocalExecutor) -> None:
    """A wide call that waits is not overtaken on a rank that is free, and a call beside them is not held up."""
    begun: list[str] = []

    def add_up(name: str, ranks: tuple[int, ...]) -> list[float]:
        return pool.call("add_up", 0, ranks=ranks, on_start=lambda _: begun.append(name))

    with ThreadPoolExecutor(3) as threads:
        first = OpenCall(pool, threads, (0, 1))
        wide = threads.submit(add_up, "wide", (0, 1, 2))
        until_waiting(pool, 1)
        next_one = threads.submit(add_up, "next", (2,))
        until_waiting(pool, 2)
        assert add_up("beside", (3,)) == [3.0]
        assert begun == ["beside"]
        assert first.end() == [1.0] * 2
        assert wide.result(SECONDS) == [3.0] * 3
        assert next_one.result(SECONDS) == [2.0]
    assert begun == ["beside", "wide", "next"]


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("SIGKILL", WorkerDied),
        ("exit", WorkerDied),
        ("SIGSTOP", WorkerHung),
        ("breaks", WorkerDied),
        ("raises", WorkerError),
    ],
)
def test_a_lost_rank_is_replaced_alone(pool: LocalExecutor, replaces: list[int], how: str, kind: type) -> None:
    """Those that waited for it, and one for another, go on with what they hold; and nothing is left between them."""
    start = time.monotonic()
    with pytest.raises(kind, match="rank 2 "):
        pool.call("lose", 2, how, ranks=(0, 2, 3))
    assert time.monotonic() - start < (DEADLINE if how == "SIGSTOP" else 0) + SECONDS
    replaces += [] if how == "raises" else [2]
    assert pool.call("add_up", 1, ranks=(3, 0)) == [5.0] * 2


def test_a_death_leaves_a_call_on_other_ranks_alone(pool: LocalExecutor, replaces: list[int]) -> None:
    """Also the one that takes the dead rank's place starts beside it."""
    with ThreadPoolExecutor(1) as threads:
        beside = OpenCall(pool, threads, (0, 1))
        threading.Timer(0.3, os.kill, (pool.pids[3], signal.SIGKILL)).start()
        with pytest.raises(WorkerDied, match=r"rank 3 .*SIGKILL"):
            pool.call("compute", 3, 30, ranks=(2, 3), expected=SECONDS)
        assert pool.call("add_up", 1, ranks=(3, 2)) == [7.0] * 2
        assert not beside.call.done()
        assert beside.end() == [1.0] * 2
    replaces.append(3)


def test_a_rank_that_died_while_idle_is_replaced_by_the_call_that_needs_it(
    pool: LocalExecutor, replaces: list[int]
) -> None:
    before = pool.pids
    os.kill(before[1], signal.SIGKILL)
    assert all_gone([before[1]])
    assert pool.call("add_up", 1, ranks=(0, 2, 3)) == total((0, 2, 3), 1)
    assert pool.call("add_up", 1, ranks=(1, 2)) == total((1, 2), 1)
    replaces.append(1)


def test_a_released_rank_is_left_out_until_it_is_taken_back(pool: LocalExecutor, replaces: list[int]) -> None:
    before = pool.pids
    pool.release(2)
    assert all_gone([before[2]])
    assert pool.call("rank") == [0, 1, 3]
    assert pool.call("add_up", 1) == total((0, 1, 3), 1)
    pool.take_back(2)
    assert pool.call("rank") == [0, 1, 2, 3]
    with pytest.raises(PlanError, match="there is no rank 4"):
        pool.release(4)
    replaces.append(2)


class NoPool:
    """In the place of the workers of an executor: which of them are ended, and when."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def with_bound(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return ranks

    def lacking(self, ranks: tuple[int, ...]) -> frozenset[int]:
        return frozenset()

    def call(self, ranks: tuple[int, ...], *_: Any) -> list[int]:
        self.done.append(("call", *ranks))
        return list(ranks)

    def drop(self, ranks: Iterable[int]) -> None:
        self.done += [("end", rank) for rank in ranks]


def test_a_change_ends_the_worker_of_a_released_rank_which_would_not_know_of_it() -> None:
    """A call that has named the rank has started it again."""
    executor, pool = LocalExecutor(["cpu"] * 2, LAZY), NoPool()
    workers: Any = pool
    executor._pool = workers
    executor.release(1)
    executor.call("rank", ranks=(1,))
    executor.call("load", "a model", replay=True)
    executor.call("rank")
    executor.remember("load", "an adapter")
    assert pool.done == [("end", 1), ("call", 1), ("end", 1), ("call", 0), ("call", 0), ("end", 1)]
    executor.take_back(1)
    executor.call("load", "a model", replay=True)
    executor.remember("load", "an adapter")
    assert pool.done[6:] == [("call", 0, 1)]
    executor.release(0)
    executor.release(1)
    with pytest.raises(PlanError, match="all 2 ranks are released: take one back first"):
        executor.call("rank")


def test_a_change_waits_for_a_call_on_a_released_rank_before_it_ends_its_worker() -> None:
    executor, held = LocalExecutor(["cpu"] * 2, LAZY), list[set[int]]()
    workers: Any = NoPool()
    executor._pool = workers
    executor.release(1)
    workers.drop = lambda ranks: held.append(set(executor._locks._owners))
    executor.call("load", "a model", replay=True)
    assert held == [{0, 1}]


@pytest.mark.breadth
def test_a_released_rank_that_a_call_has_named_has_the_changes_of_later_calls() -> None:
    with LocalExecutor(["cpu"] * 2, LAZY, deadline=DEADLINE, one_by_one=True) as pool:
        pool.release(1)
        assert pool.call("what_is_loaded", ranks=(1,)) == [[]], "it is started again"
        pool.call("load", "a model", replay=True)
        assert pool.call("what_is_loaded", ranks=(1,)) == [["a model"]]
        pool.remember("load", "an adapter")
        pool.take_back(1)
        assert pool.call("what_is_loaded") == [["a model"], ["a model", "an adapter"]]


def test_ranks_that_hold_parts_of_one_state_are_lost_together(pool: LocalExecutor, replaces: list[int]) -> None:
    pool.call("load", "a part", ranks=(0, 2), divides=True)
    assert pool.call("ranks", ranks=(2, 1)) == [(2, 1, 0)] * 3, "it brings the other with it"
    with pytest.raises(WorkerDied):
        pool.call("crash", 0, "SIGKILL", ranks=(0,))
    replaces += [0, 2]


def test_parts_that_are_given_back_bind_no_more(pool: LocalExecutor, replaces: list[int]) -> None:
    pool.call("rank", ranks=(0, 2), divides=True)
    pool.call("rank", ranks=(0,), divides=False)
    assert pool.call("ranks", ranks=(0,)) == [(0,)]
    with pytest.raises(WorkerDied):
        pool.call("crash", 0, "SIGKILL", ranks=(0, 2))
    replaces.append(0)


@pytest.mark.parametrize("together", [True, False])
def test_a_cancelled_call_ends_at_the_same_pause_point_on_all_ranks(
    pool: LocalExecutor, replaces: list[int], together: bool
) -> None:
    """Ranks that exchange in each step, and those that run ahead of another, which catches up."""
    cancelled = threading.Event()
    threading.Timer(0.5, cancelled.set).start()
    with pytest.raises(CallCancelled):
        pool.call("steps", 200, 0.1, ranks=(2, 1, 0), together=together, is_cancelled=cancelled.is_set)
    taken = pool.call("steps_taken", ranks=(0, 1, 2))
    assert len(set(taken)) == 1
    assert 1 < taken[0] < 200


def test_a_cancelled_call_that_a_rank_has_ended_goes_on_to_its_end(pool: LocalExecutor, replaces: list[int]) -> None:
    """That rank sent messages which the others have still to read."""
    cancelled = threading.Event()
    threading.Timer(1.2, cancelled.set).start()  # rank 0 takes 0.4 s, rank 1 takes 2 s
    with pytest.raises(CallCancelled):
        pool.call("steps", 10, 0.2, ranks=(1, 0), together=False, is_cancelled=cancelled.is_set)
    assert pool.call("steps_taken", ranks=(0, 1)) == [10, 10]


def test_a_call_that_waits_is_cancelled_at_once(pool: LocalExecutor) -> None:
    cancelled = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        runs = OpenCall(pool, threads, (0,))
        waits = threads.submit(pool.call, "rank", is_cancelled=cancelled.is_set)
        until_waiting(pool, 1)
        assert not waits.done()
        cancelled.set()
        pool.wake()
        with pytest.raises(CallCancelled):
            waits.result(SECONDS / 2)
        assert not runs.call.done()
        runs.end()
    assert pool.call("rank") == [0, 1, 2, 3]


def test_a_rank_that_is_lost_while_the_others_are_held(pool: LocalExecutor, replaces: list[int]) -> None:
    cancelled = threading.Event()
    threading.Timer(0.3, os.kill, (pool.pids[1], signal.SIGSTOP)).start()
    threading.Timer(0.5, cancelled.set).start()
    with pytest.raises(WorkerHung, match="rank 1 "):
        pool.call("steps", 30, 0.1, ranks=(0, 1, 2), is_cancelled=cancelled.is_set)
    replaces.append(1)


def test_no_call_within_a_call_on_any_rank(pool: LocalExecutor) -> None:
    with pytest.raises(LaunchError, match="called during a call, such as a callback, cannot make another one"):
        pool.call("count", 1, ranks=(0,), on_event=lambda rank, event: pool.call("rank", ranks=(1,)))
    assert pool.call("rank") == [0, 1, 2, 3]


def traces(pool: LocalExecutor) -> Any:
    """Descriptors and threads here and on each rank, and names in shared memory."""
    gc.collect()
    here = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    of_others = "sem.mp-"  # of Python's own multiprocessing, which we do not use
    names = {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(of_others)}
    return here, pool.call("traces"), names


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.breadth
@pytest.mark.parametrize("number", [6, 200])
def test_no_sequence_leaves_anything_behind(pool: LocalExecutor, number: int) -> None:
    """Random sets of ranks at the same time, of which some lose a rank."""
    chance = random.Random(number)
    for pair in itertools.combinations(range(WORLD), 2):
        pool.call("add_up", 0, ranks=pair)
    before, lost = traces(pool), 0

    def one(ranks: list[int], fault: str) -> list[float] | None:
        if not fault:
            return pool.call("add_up", 5, 3, ranks=ranks)
        with pytest.raises((WorkerError, KeyError)):  # alone it raises its own
            pool.call("lose", ranks[-1], fault, ranks=ranks)
        return None

    with ThreadPoolExecutor(WORLD) as threads:
        for _ in range(number):
            order = chance.sample(range(WORLD), WORLD)
            cuts = sorted({0, WORLD, *chance.sample(range(1, WORLD), chance.randrange(WORLD))})
            sets = [order[start:end] for start, end in itertools.pairwise(cuts)]
            faults = [chance.choice(["", "", "", "SIGKILL", "raises"]) for _ in sets]
            lost += faults.count("SIGKILL")
            for ranks, fault, found in zip(sets, faults, threads.map(one, sets, faults), strict=True):
                assert fault or found == total(ranks, 5)
    assert lost, "otherwise another seed"
    for pair in itertools.combinations(range(WORLD), 2):
        pool.call("add_up", 0, ranks=pair)
    here, ranks, names = traces(pool)
    assert here[0] <= before[0][0]
    assert here[1] <= before[0][1] + WORLD  # of this test
    assert all(now <= first + 1 for (now, _), (first, _) in zip(ranks, before[1], strict=True))
    assert names <= before[2]
