"""How ranks with a caller each agree over links: everybody hears everybody, or who has gone or is late."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from patchpar.errors import LaunchError, WorkerDied, WorkerHung
from patchpar.launch import control_group
from patchpar.launch.control_group import LinkControl
from patchpar.launch.executor import CallAborted

PATIENCE = 20.0


@pytest.fixture
def controls():
    """Three ranks of this process."""
    pairs = [socket.socketpair() for _ in range(2)]
    made = [LinkControl(0, 3, {1: pairs[0][0], 2: pairs[1][0]})]
    made += [LinkControl(rank, 3, {0: pair[1]}) for rank, pair in enumerate(pairs, 1)]
    yield made
    for control in made:
        control.leave()


def on_all(controls, work):
    """What `work(control, rank)` returns or raises, by rank."""

    def run(rank):
        try:
            return work(controls[rank], rank)
        except Exception as error:  # noqa: BLE001  the test looks at it
            return error

    with ThreadPoolExecutor(len(controls)) as threads:
        return list(threads.map(run, range(len(controls))))


def test_all_hear_rank_0_and_one_another(controls):
    def work(control, rank):
        first = control.gather(b"%d" % rank, PATIENCE)
        replies = [control.broadcast(b"x" * size if rank == 0 else b"") for size in (0, 3, 1_000_000)]
        return first, [len(reply) for reply in replies], control.gather(b"", PATIENCE)

    assert on_all(controls, work) == [([b"0", b"1", b"2"], [0, 3, 1_000_000], [b""] * 3)] * 3


def test_a_late_rank_is_waited_for_and_an_early_one_waits(controls):
    def work(control, rank):
        time.sleep({0: 0.2, 1: 0.0, 2: 0.4}[rank])
        return control.gather(b"%d" % rank, PATIENCE)

    assert on_all(controls, work) == [[b"0", b"1", b"2"]] * 3


def test_who_is_too_late_is_named_on_all_and_hears_it_too(controls):
    has_judged = threading.Event()

    def work(control, rank):
        if rank == 2:
            has_judged.wait(PATIENCE)
        try:
            return control.gather(b"", 0.3)
        finally:
            if rank == 0:
                has_judged.set()

    errors = on_all(controls, work)
    assert all(isinstance(error, WorkerHung) and error.rank == 2 for error in errors)
    assert "rank 2 has not finished within 0 s of rank 0" in str(errors[1])
    assert on_all(controls, lambda control, rank: control.gather(b"again", PATIENCE)) == [[b"again"] * 3] * 3


def test_a_rank_that_reads_nothing_holds_up_no_other(controls, monkeypatch):
    """What the others have said is more than fits between two processes: rank 0 would wait until it is read."""
    monkeypatch.setattr(control_group, "MARGIN", 0.2)
    have_judged, is_over = threading.Barrier(2), threading.Event()

    def work(control, rank):
        if rank == 2:
            found = is_over.wait(PATIENCE)
            control.leave()
            return found
        try:
            return control.gather(b"x" * 5_000_000 if rank else b"", 0.5)
        finally:
            have_judged.wait(PATIENCE)
            is_over.set()

    *errors, in_time = on_all(controls, work)
    assert in_time
    assert all(isinstance(error, WorkerHung) and error.rank == 2 for error in errors)


def test_rank_0_reads_nothing(controls):
    too_late = threading.Timer(PATIENCE, controls[0].leave)
    too_late.start()
    with pytest.raises(WorkerHung, match="rank 0 has not read a message for 0 s"):
        controls[1].gather(b"x" * 5_000_000, 0.2)
    too_late.cancel()


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_has_gone_is_named_at_once(controls, leaver):
    def work(control, rank):
        return control.leave() if rank == leaver else control.gather(b"", 600.0)

    for rank, error in enumerate(on_all(controls, work)):
        if rank != leaver:
            assert isinstance(error, WorkerDied)
            assert error.rank == leaver
            assert f"rank {leaver} has gone" in str(error)


def test_who_said_its_word_may_leave(controls):
    def work(control, rank):
        found = control.gather(b"%d" % rank, PATIENCE)
        control.leave()
        return found

    assert on_all(controls, work) == [[b"0", b"1", b"2"]] * 3


def test_a_rank_that_waits_for_an_answer_hears_that_the_call_is_over(controls):
    """Rank 0 has failed: it goes on to say so, and never answers."""

    def work(control, rank):
        aborted = False
        if rank:
            try:
                control.broadcast(b"")
            except CallAborted:
                aborted = True
        return aborted, control.gather(b"failed" if rank == 0 else b"", PATIENCE)

    words = [b"failed", b"", b""]
    assert on_all(controls, work) == [(False, words), (True, words), (True, words)]


def test_answers_that_nobody_took_are_passed_over(controls):
    def work(control, rank):
        if rank == 0:
            control.broadcast(b"answer")
        words = control.gather(b"", PATIENCE)
        return words, control.broadcast(b"next" if rank == 0 else b"")

    assert on_all(controls, work) == [([b""] * 3, b"next")] * 3


def test_after_leaving(controls):
    controls[0].leave()
    for attempt in (lambda: controls[0].gather(b"", 1.0), lambda: controls[0].broadcast(b"")):
        with pytest.raises(LaunchError, match="closed"):
            attempt()
