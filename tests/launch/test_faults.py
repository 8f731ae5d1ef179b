"""Workers that raise, die or hang: what the caller is told, how soon, and that the next call works."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patchpar.errors import LaunchError, PlanError, WorkerDied, WorkerError, WorkerHung
from patchpar.launch.local import LocalExecutor
from patchpar.launch.process import WorkerProcess
from patchpar.launch.worker_executor import MAX_FAILED_STARTS, PAUSE_SECONDS
from tests.breadth import first_of
from tests.launch.conftest import DEADLINE, PLAIN, all_gone
from tests.launch.plain import Strange

NOT_BEGUN = r"SIGKILL.*before it began this call; the next call starts a new one"


@pytest.fixture(scope="module")
def single() -> Iterator[LocalExecutor]:
    """One worker that needs no torch, so that it is soon there again."""
    with LocalExecutor(["cpu"], PLAIN, deadline=DEADLINE) as executor:
        executor.call("load", "the model", replay=True)
        yield executor


@pytest.fixture
def restarts(request):
    """Checks that the workers are new after the test, and have loaded what the old ones had."""
    pool = request.getfixturevalue("single" if "single" in request.fixturenames else "pool")
    before = set(pool.call("rank") and pool.pids)
    yield
    assert pool.call("what_is_loaded") == [["the model"]] * pool.world_size
    assert not before & set(pool.pids)
    assert all_gone(before)
    if pool.world_size > 1:
        assert pool.call("add_up", 1) == [3.0, 3.0]


@pytest.fixture
def survives(pool):
    """Checks that the workers are the same after the test."""
    before = pool.call("facts") and pool.pids
    yield
    assert pool.call("add_up", 1) == [3.0, 3.0]
    assert pool.pids == before


@pytest.mark.parametrize(("kind", "expected"), [("ValueError", ValueError), ("PlanError", PlanError)])
def test_what_all_ranks_raise_comes_as_it_is(pool, survives, kind, expected):
    with pytest.raises(expected, match=r"^height 7 is odd$") as caught:
        pool.call("fail", kind, "height 7 is odd")
    assert type(caught.value) is expected
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerError)
    assert "rank 0 (cpu, pid" in str(cause)
    assert "in fail" in str(cause), "the traceback of the worker"


def test_an_exception_of_a_class_of_its_own(pool, survives):
    with pytest.raises(WorkerError, match=r"(?s)raised tests.launch.plain.Strange: odd.*Traceback.*in fail"):
        pool.call("fail", "Strange", "odd")
    with pytest.raises(KeyError, match=r"StrangeKey.*odd"):
        pool.call("fail", "Key", "odd")


def test_an_exception_of_one_rank_while_the_others_return(pool, survives):
    with pytest.raises(WorkerError, match=r"rank 1 \(cpu, pid \d+\) raised ValueError: only here"):
        pool.call("fail", "ValueError", "only here", [1])


def test_an_exception_of_one_rank_while_the_others_wait_for_it(pool, restarts):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)rank 1 \(cpu, pid \d+\) raised KeyError: 'missing'.*Traceback"):
        pool.call("fail_before_collective", 1)
    assert time.monotonic() - start < DEADLINE + 20


def test_ranks_that_failed_at_different_exchange_points_are_not_used_again(pool, restarts):
    """A message of one may still be on its way to the other."""
    with pytest.raises(ValueError, match=r"late|early"):
        pool.call("out_of_step")


def test_leaving_is_an_exception_too(pool, survives):
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        pool.call("leave")


def test_results_and_events_that_cannot_be_sent(pool, survives):
    with pytest.raises(TypeError, match=r"what it returned \(a lock\) cannot be sent to the caller"):
        pool.call("unsendable")
    with pytest.raises(TypeError, match=r"an event \(a lock\) cannot be sent to the caller"):
        pool.call("emit_unsendable")


def test_unknown_methods(pool, survives):
    with pytest.raises(AttributeError, match="no method 'paint'; it has add_up"):
        pool.call("paint")


def test_a_worker_that_dies_is_named_at_once(single, restarts):
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        single.call("crash", 0, "exit")
    assert time.monotonic() - start < 20
    text = str(caught.value)
    assert "rank 0 (cpu, pid" in text
    assert "exit code 7" in text
    assert "last exchange point 'before the end'" in text
    assert "these are my last words" in text


def test_a_worker_killed_from_outside_in_a_collective(pool, restarts):
    victim = pool.call("facts") and pool.pids[1]
    timer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    timer.start()
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 1 .*SIGKILL.*last exchange point 'all-reduce'"):
        pool.call("wait_for_rank_0", 30)
    assert time.monotonic() - start < 20


def test_a_worker_that_died_while_idle_is_replaced(single, restarts):
    os.kill(single.pids[0], signal.SIGKILL)
    assert all_gone(single.pids)


@contextmanager
def killed_before_they_read(pids):
    """Stops workers, so that they do not read the call that is made here, and kills them half a second later."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    killers = [threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)) for pid in pids]
    for killer in killers:
        killer.start()
    yield
    for killer in killers:
        killer.join()


def test_workers_that_die_before_any_has_begun_the_call_are_replaced(pool, restarts):
    with killed_before_they_read(pool.pids):
        assert pool.call("echo", 7) == [((7,), {}), ((7,), {})]


def test_the_call_is_made_again_once_only(single, restarts, monkeypatch):
    single.call("rank")
    make_ready = single._make_ready

    def dies_again(ranks):
        make_ready(ranks)
        os.kill(single.pids[0], signal.SIGKILL)
        assert all_gone(single.pids)

    with monkeypatch.context() as patch:
        patch.setattr(single, "_make_ready", dies_again)
        with pytest.raises(WorkerDied, match=NOT_BEGUN) as caught:
            single.call("rank")
    assert not caught.value.begun


def test_a_call_that_another_rank_has_begun_is_not_made_again(pool):
    """It may have changed what it was to change."""
    with killed_before_they_read(pool.pids[1:]), pytest.raises(WorkerDied, match=rf"rank 1 .*{NOT_BEGUN}"):
        pool.call("load", "something else")
    assert pool.call("add_up", 1) == [3.0, 3.0]


def test_a_call_with_values_from_the_caller_is_not_made_again(single, restarts):
    """They went to the worker that is lost."""
    with killed_before_they_read(single.pids), pytest.raises(WorkerDied, match=NOT_BEGUN):
        single.call("rank", on_start=lambda send: send(0, "a value"))


def test_a_worker_that_hangs_is_named_within_the_deadline(pool, restarts):
    start = time.monotonic()
    with pytest.raises(WorkerHung) as caught:
        pool.call("stall", 1)
    assert DEADLINE <= time.monotonic() - start < DEADLINE + 20
    text = str(caught.value)
    assert "rank 1 (cpu, pid" in text
    assert "last exchange point 'the last good place' (rank 0: last exchange point 'all-reduce')" in text
    assert f"(limit {DEADLINE:g} s)" in text
    assert "in stall" in text, "where its Python stands"


def test_a_stopped_worker_is_named(single, restarts):
    [victim] = single.pids
    os.kill(victim, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerHung, match=rf"rank 0 \(cpu, pid {victim}\) does not answer"):
        single.call("rank")
    assert time.monotonic() - start < DEADLINE + 20


def test_an_exception_in_on_ask_is_the_callers_own(pool, survives):
    def refuse(question):
        raise Strange(f"no at step {question['step']}")

    with pytest.raises(Strange, match=r"^no at step 0$") as caught:
        pool.call("converse", 3, on_ask=refuse)
    assert caught.value.__traceback__ is not None


def test_asking_a_caller_that_does_not_answer(pool, survives):
    with pytest.raises(RuntimeError, match="without on_ask"):
        pool.call("converse", 1)


def test_an_exception_in_on_event_ends_the_call(single, restarts):
    def refuse(rank, event):
        raise Strange("the caller's own")

    start = time.monotonic()
    with pytest.raises(Strange, match="the caller's own"):
        single.call("emit_then_sleep", 30, on_event=refuse)
    assert time.monotonic() - start < 20


def test_a_call_within_a_call_is_refused(pool):
    with pytest.raises(LaunchError, match="called during a call, such as a callback, cannot make another one"):
        pool.call("converse", 1, on_ask=lambda question: pool.call("rank"))
    assert pool.call("rank") == [0, 1]


def test_interrupting_a_call_ends_its_work_at_once(single, restarts):
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        single.call("sleep", 30)
    assert time.monotonic() - start < 20


def test_closing_from_another_thread_ends_a_call():
    executor = LocalExecutor(["cpu"], PLAIN)
    pids = executor.call("rank") and executor.pids
    threading.Timer(0.3, executor.close).start()
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"the workers were closed during the call, by close\(\)"):
        executor.call("sleep", 30)
    assert time.monotonic() - start < 20
    assert all_gone(pids)


def test_closing_while_a_call_is_repeated_on_a_new_worker():
    executor = LocalExecutor(["cpu"], PLAIN)
    executor.call("sleep", 3.0, replay=True)
    os.kill(executor.pids[0], signal.SIGKILL)
    assert all_gone(executor.pids)

    def close_in_the_call():
        while not executor._pool._ready & executor._pool._busy:
            time.sleep(0.01)
        executor.close()

    closes = threading.Thread(target=close_in_the_call)
    closes.start()
    with pytest.raises(LaunchError, match=r"^the workers were closed during the call, by close\(\)$"):
        executor.call("rank")
    closes.join()


def interrupt_in(where, monkeypatch):
    """Let the next call of a method of workers be interrupted; the list that is returned is empty afterwards."""
    whole, interrupts = getattr(WorkerProcess, where), [KeyboardInterrupt]

    def interrupted(self, *args):
        if interrupts:
            raise interrupts.pop()
        return whole(self, *args)

    monkeypatch.setattr(WorkerProcess, where, interrupted)
    return interrupts


def test_closing_from_another_thread_ends_a_start():
    """The workers, which are killed, did not fail."""
    with LocalExecutor(["cpu"], PLAIN, preload=["tests.launch.slow_module"]) as executor:
        executor.start()
        closing = threading.Timer(0.3, executor.close)
        closing.start()
        with pytest.raises(LaunchError, match=r"^this executor is closed"):
            executor.call("rank")
        closing.join()


def test_an_interrupt_of_close_ends_the_workers_all_the_same(monkeypatch):
    """Also one that does not stop when it is asked to, and whose program catches the interrupt."""
    executor = LocalExecutor(["cpu"], PLAIN)
    pids = executor.call("rank") and executor.pids
    interrupts = interrupt_in("wait", monkeypatch)
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(KeyboardInterrupt):
        executor.close()
    assert not interrupts
    assert all_gone(pids)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("no_such_module:Engine", r"cannot import the engine 'no_such_module:Engine': No module named"),
        ("tests.launch.plain:Missing", r"has no class 'Missing'"),
        ("tests.launch.plain:BadEngine", r"this engine cannot be built"),
    ],
)
def test_an_engine_that_cannot_start_is_said_and_not_tried_for_ever(engine, says, monkeypatch):
    with LocalExecutor(["cpu"], engine) as executor:
        for _ in range(3):
            with pytest.raises(LaunchError, match=says):
                executor.call("rank")
            assert executor.pids == ()
        monkeypatch.setattr(executor._pool, "start", lambda ranks: pytest.fail("it is tried again"))
        with pytest.raises(LaunchError, match=rf"(?s)3 times in a row.*{says}"):
            executor.call("rank")


def test_workers_are_started_once_the_cause_is_gone(monkeypatch):
    """Of a server nobody else can make a new executor."""

    def fails(ranks):
        raise LaunchError("there is no room")

    with LocalExecutor(["cpu"], PLAIN) as executor:
        with monkeypatch.context() as broken:
            broken.setattr(executor._pool, "start", fails)
            for _ in range(MAX_FAILED_STARTS):
                with pytest.raises(LaunchError, match=r"^there is no room"):
                    executor.call("rank")
        with pytest.raises(LaunchError, match=r"3 times in a row.* s or later.*no room"):
            executor.call("rank")
        executor._failed_at -= PAUSE_SECONDS
        assert executor.call("rank") == [0]
        executor._pool.drop([0])
        monkeypatch.setattr(executor._pool, "start", fails)
        for _ in range(MAX_FAILED_STARTS):  # in a row: those before the workers were there do not count
            with pytest.raises(LaunchError, match=r"^there is no room"):
                executor.call("rank")


def test_starts_that_were_interrupted_have_not_failed(monkeypatch):
    def interrupted(ranks):
        raise KeyboardInterrupt

    with LocalExecutor(["cpu"], PLAIN) as executor:
        monkeypatch.setattr(executor._pool, "start", interrupted)
        for _ in range(MAX_FAILED_STARTS + 1):
            with pytest.raises(KeyboardInterrupt):
                executor.call("rank")


def test_a_worker_that_dies_while_it_starts():
    with (
        LocalExecutor(["cpu"], "tests.launch.plain:DyingEngine") as executor,
        pytest.raises(LaunchError, match=r"could not be started: rank 0 .* ended with exit code 9"),
    ):
        executor.call("rank")


def test_workers_of_another_version_are_refused(monkeypatch):
    monkeypatch.setattr("patchpar.launch.pool.versions", lambda: {"python": "3.99", "patchpar": "0"})
    with (
        LocalExecutor(["cpu"], PLAIN) as executor,
        pytest.raises(LaunchError, match=r"rank 0 has .*where .*3\.99.* was expected"),
    ):
        executor.call("rank")


def test_a_start_that_takes_too_long():
    with (
        LocalExecutor(["cpu"], PLAIN, start_timeout=0.3, preload=["tests.launch.slow_module"]) as executor,
        pytest.raises(LaunchError, match=r"could not be started: rank 0 .*limit 0.3 s"),
    ):
        executor.call("rank")


def test_a_replay_repeats_small_calls_as_they_were_and_large_ones_anew():
    with LocalExecutor(["cpu"], PLAIN) as executor:
        small, large = ["model"], b"weights" * 100_000
        executor.call("load", small, replay=True)
        executor.call("load", large, replay=True)
        executor.call("load", "not to be replayed")
        with pytest.raises(ValueError, match="bad"):
            executor.call("fail", "ValueError", "bad", replay=True)
        small.append("changed since")
        with pytest.raises(WorkerDied):
            executor.call("crash", 0, "SIGKILL")
        assert executor.call("what_is_loaded") == [[["model"], large]]


def test_a_replay_that_fails_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with LocalExecutor(["cpu"], PLAIN) as executor:
        executor.call("load_once", "marker", replay=True)
        with pytest.raises(WorkerDied):
            executor.call("crash", 0, "exit")
        with pytest.raises(LaunchError, match=r"restarted, but repeating 'load_once' failed: .*second time"):
            executor.call("rank")


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.usefixtures("template")
@pytest.mark.breadth
def test_a_start_that_fails_leaves_no_descriptors(monkeypatch):
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/such/python")
        for _ in range(3):
            with pytest.raises(LaunchError, match="cannot start a worker with '/no/such/python'") as caught:
                LocalExecutor(["cpu"] * 3, PLAIN).start()
            assert descriptors() <= before, "also while somebody holds the exception"
            del caught
    for engine in ("tests.launch.plain:Missing", "tests.launch.plain:DyingEngine"):
        with LocalExecutor(["cpu"] * 2, engine) as executor, pytest.raises(LaunchError):
            executor.call("rank")
        assert descriptors() <= before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("where", first_of(["wait", "release"], "wait"))
@pytest.mark.usefixtures("template")
def test_a_second_interrupt_leaves_no_descriptors(where, monkeypatch):
    """It comes while the first one ends the workers."""
    before = descriptors()

    def interrupt(rank, event):
        raise KeyboardInterrupt

    with LocalExecutor(["cpu"], PLAIN) as executor:
        pids = executor.call("rank") and executor.pids
        interrupts = interrupt_in(where, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            executor.call("emit_then_sleep", 30, on_event=interrupt)
        assert not interrupts
        assert all_gone(pids)
        assert descriptors() <= before


@pytest.mark.breadth
def test_five_restarts_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def traces():
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        shared = {path.name for path in Path("/dev/shm").iterdir()}
        children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid="], capture_output=True, check=False)
        return descriptors, shared, len(children.stdout.split()), threading.active_count()

    with LocalExecutor(["cpu"], PLAIN) as executor:
        executor.call("rank")  # what stays is there from now on: the template process
    gc.collect()
    before = traces()
    with LocalExecutor(["cpu"], PLAIN) as executor:
        pids = set()
        for _ in range(5):
            executor.call("load", "the model")
            pids |= set(executor.pids)
            with pytest.raises(WorkerDied):
                executor.call("crash", 0, "SIGKILL")
        assert len(pids) == 5
    assert all_gone(pids)
    gc.collect()
    assert all(after <= first for after, first in zip(traces(), before, strict=True))
    assert list(tmp_path.iterdir()) == []
