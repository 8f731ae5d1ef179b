"""After a failed call under torchrun: another one if no message can be in flight between ranks, else a refusal."""

import contextlib
import gc
import itertools
import os
import weakref
from pathlib import Path

import pytest

from patchpar.errors import AuthenticationError, ExchangeError, LaunchError, WorkerHung
from patchpar.launch import torchrun
from patchpar.launch.remote_errors import take_down
from patchpar.launch.torchrun import _is_cause, _step_lost
from tests.launch.fake_gpus import FakeGpus
from tests.launch.test_forks import code_of_child
from tests.launch.threads_as_ranks import on_ranks, ranks_of_torchrun

in_a_hurry = pytest.mark.parametrize("call", [0.5], ids=["deadline 0.5 s"], indirect=True)


def open_sockets():
    """The number of sockets that this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(descriptor.readlink()).startswith("socket:")
    return found


@pytest.fixture
def call(request, monkeypatch):
    """Make a call on two ranks; what each returns or raises."""
    deadline = getattr(request, "param", 20.0)
    executors = ranks_of_torchrun(monkeypatch, [FakeGpus([]), FakeGpus([])], deadline=deadline)
    yield lambda *args: on_ranks(lambda rank: executors[rank].call(*args), range(2))
    for executor in executors:
        executor.close()


def test_ranks_that_failed_at_the_same_point_go_on(call):
    for ranks in ([0, 1], [1]):
        assert all(isinstance(error, Exception) for error in call("fail", "ValueError", "alike", ranks))
    assert call("rank") == [[0, None], [None, 1]]


def test_ranks_that_failed_at_different_points_are_refused(call):
    assert [str(error) for error in call("out_of_step")] == ["late", "early"]
    for _ in range(2):
        for error in call("rank"):
            assert isinstance(error, LaunchError)
            assert "out_of_step failed on rank 0 between two exchanges (ValueError: late)" in str(error)
            assert "create it again" in str(error)


@in_a_hurry
def test_a_rank_that_fails_early_waits_for_those_that_wait_for_it(call):
    errors = call("wait_in_vain", 0.6)  # longer than the deadline, as a rank that waits until then and reports it
    assert [type(error).__name__ for error in errors] == ["ValueError", "WorkerError"], errors
    assert "early" in str(errors[1])


@in_a_hurry
def test_a_rank_that_was_late_is_not_waited_for_again(call):
    hung = call("stall_one", 1, 3.0)
    assert [type(error) for error in hung] == [WorkerHung, WorkerHung]
    for error in call("rank"):
        assert isinstance(error, LaunchError)
        assert "rank 1 has not finished within" in str(error)


def test_ranks_that_were_interrupted_are_refused(monkeypatch):
    """Each is somewhere else in the call, and what the others have sent it would be read by the next call."""
    executors = ranks_of_torchrun(monkeypatch, [FakeGpus([]), FakeGpus([])], deadline=20.0)

    def interrupted(rank):
        def interrupt(call):
            raise KeyboardInterrupt

        executors[rank]._run_here = interrupt
        try:
            executors[rank].call("rank")
        except KeyboardInterrupt:
            del executors[rank]._run_here
            return "interrupted"

    assert on_ranks(interrupted, range(2)) == ["interrupted"] * 2
    for rank, error in enumerate(on_ranks(lambda rank: executors[rank].call("rank"), range(2))):
        assert isinstance(error, LaunchError)
        assert f"rank was ended by a KeyboardInterrupt on rank {rank}" in str(error)
    for executor in executors:
        executor.close()


def test_ranks_of_which_one_does_not_say_how_far_it_came_are_refused(monkeypatch):
    executors = ranks_of_torchrun(monkeypatch, [FakeGpus([]), FakeGpus([])], deadline=20.0)
    for executor in executors:
        gather, gathers = executor._control.gather, itertools.count()

        def fails(data, patience, gather=gather, gathers=gathers):
            if next(gathers) == 2:  # after the arguments, and the failures
                raise WorkerHung("rank 1 has not finished")
            return gather(data, patience)

        monkeypatch.setattr(executor._control, "gather", fails)
    assert [type(each) for each in on_ranks(lambda rank: executors[rank].call("out_of_step"), range(2))] == [
        WorkerHung
    ] * 2
    for error in on_ranks(lambda rank: executors[rank].call("rank"), range(2)):
        assert isinstance(error, LaunchError)
        assert "out_of_step failed, and not every rank has said how far it came" in str(error)
    for executor in executors:
        executor.close()


def test_ranks_that_cannot_start_together_leave_nothing_open(monkeypatch):
    """A script may try again, and what it holds of the first error would keep the sockets."""
    numbers = itertools.count()
    monkeypatch.setattr(torchrun, "versions", lambda: {"patchpar": str(next(numbers))})
    before = open_sockets()
    errors = ranks_of_torchrun(monkeypatch, [FakeGpus([]), FakeGpus([])])
    assert all("use the same versions" in str(error) for error in errors)
    assert open_sockets() == before


def test_an_executor_that_nobody_closes_is_freed_with_its_engine(monkeypatch):
    """And with the model that it has on a GPU, not only when the script ends."""

    def engines():
        executors = ranks_of_torchrun(monkeypatch, [FakeGpus([]), FakeGpus([])])
        assert on_ranks(lambda rank: executors[rank].call("rank"), range(2)) == [[0, None], [None, 1]]
        return [weakref.ref(executor._engine) for executor in executors], open_sockets()

    gc.collect()  # what other tests have left
    found, while_open = engines()
    gc.collect()
    assert [engine() for engine in found] == [None, None]
    assert open_sockets() <= while_open - 4, "the ends of the links between two ranks, and of their control"


def test_what_a_call_is_given_is_for_that_call_alone(monkeypatch):
    """Its callbacks, and the time that it is expected to take beyond the deadline."""
    executors = ranks_of_torchrun(monkeypatch, [FakeGpus([]), FakeGpus([])], deadline=20.0)
    for options, wanted in (({"expected": 5.0, "on_event": print}, 25.0), ({}, 20.0)):
        on_ranks(lambda rank, options=options: executors[rank].call("rank", **options), range(2))
        assert [executor._context.deadline for executor in executors] == [wanted] * 2
        assert [executor._context.callbacks.on_event for executor in executors] == [None] * 2
    for executor in executors:
        executor.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_makes_no_call_and_the_ranks_go_on(monkeypatch):
    before = open_sockets()
    executors = ranks_of_torchrun(monkeypatch, [FakeGpus([]), FakeGpus([])])

    def in_child():
        try:
            executors[0].call("rank")
        except LaunchError as error:
            return 5 if "was forked from it" in str(error) else 6
        return 7

    assert code_of_child(in_child) == 5
    assert code_of_child(lambda: 5 if open_sockets() <= before else 6) == 5, "or this rank would live as long as it"
    assert on_ranks(lambda rank: executors[rank].call("rank"), range(2)) == [[0, None], [None, 1]]
    for executor in executors:
        executor.close()


def test_a_failed_exchange_leaves_messages_even_where_all_ranks_are_at_the_same_point():
    failed, lost = take_down(ValueError("own")), take_down(ExchangeError("rank 1 is gone"))
    assert _step_lost("generate", [failed, failed], [b"4", b"4"]) == ""
    assert _step_lost("generate", [failed, None], [b"4", b""]) == "", "the other rank took no part"
    assert _step_lost("generate", [failed, None], [b"4", b"5"])
    refused = take_down(AuthenticationError("somebody else has sent it"))
    assert "somebody else" in _step_lost("generate", [None, refused], [b"4", b"4"])
    assert _is_cause(refused), "the others raise it too"
    assert not _is_cause(lost)
    assert "rank 1 is gone" in _step_lost("generate", [lost, None], [b"4", b"4"])
