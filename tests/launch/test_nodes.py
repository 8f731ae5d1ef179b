"""Ranks on two nodes that one caller controls: shared memory within a node, TCP between them, and faults of both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patchpar.errors import LaunchError, WorkerDied, WorkerHung
from patchpar.launch.network import remote_rank, remote_worker
from patchpar.launch.worker_executor import WorkerExecutor
from tests.launch.conftest import PLAIN, all_gone
from tests.launch.forked_actors import ForkedActors, executor_on

LAZY = "tests.launch.lazy:LazyEngine"
NODES = ("one", "one", "two")
WORLD = len(NODES)


@pytest.fixture(scope="module")
def nodes() -> Iterator[WorkerExecutor]:
    with executor_on(ForkedActors(NODES), LAZY) as executor:
        executor.call("load", "the model", replay=True)
        yield executor


def test_ranks_of_a_node_share_memory_and_others_use_tcp(nodes: WorkerExecutor) -> None:
    assert nodes.call("add_up", 1, 20) == [6.0] * WORLD
    assert nodes.call("lines") == [
        {1: "PeerSocket", 2: "PeerStream"},
        {0: "PeerSocket", 2: "PeerStream"},
        {0: "PeerStream", 1: "PeerStream"},
    ]


def test_large_values_come_and_go(nodes: WorkerExecutor) -> None:
    value = np.arange(300_000.0)
    for args, kwargs in nodes.call("echo", value, text="x" * 100_000):
        assert np.array_equal(args[0], value)
        assert kwargs == {"text": "x" * 100_000}


def test_the_first_rank_asks_and_all_are_answered(nodes: WorkerExecutor) -> None:
    asked: list[tuple[int, int]] = []
    found = nodes.call("converse_in_turn", 2, ranks=(2, 0), on_ask=lambda each: asked.append(each) or each)
    assert found == [[(2, 0), (2, 1)]] * 2
    assert asked == [(2, 0), (2, 1)]


def test_an_exception_is_that_of_the_engine(nodes: WorkerExecutor) -> None:
    with pytest.raises(ValueError, match="of the engine"):
        nodes.call("fail", "ValueError", "of the engine")


@pytest.mark.parametrize(
    ("rank", "how", "error"),
    [
        (2, "SIGKILL", WorkerDied),
        (1, "SIGSTOP", WorkerHung),
        pytest.param(0, "SIGKILL", WorkerDied, marks=pytest.mark.breadth),
    ],
)
def test_a_rank_that_is_lost_is_replaced_alone(nodes: WorkerExecutor, rank: int, how: str, error: type) -> None:
    before = nodes.call("rank") and nodes.pids
    with pytest.raises(error, match=f"rank {rank} .*pid {before[rank]}.*(exchange point '|before its first)") as raised:
        nodes.call("lose", rank, how)
    assert raised.value.rank == rank
    assert nodes.ready(range(WORLD)) == tuple(each for each in range(WORLD) if each != rank)
    assert nodes.call("add_up", 1, 3) == [6.0] * WORLD
    assert nodes.call("what_is_loaded") == [["the model"]] * WORLD
    assert [each for each in range(WORLD) if nodes.pids[each] != before[each]] == [rank]


def test_nothing_is_left_of_them(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("5" * 64)
    secret.chmod(0o600)
    actors = ForkedActors(("one", "two"))
    with executor_on(actors, PLAIN, secret_file=secret) as executor:
        assert executor.call("rank") == [0, 1]
        pids = executor.pids
    assert all_gone(pids)
    assert actors.have_ended()


def test_a_rank_with_another_secret_is_refused(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for number, file in enumerate((mine, other)):
        file.write_text(str(number) * 64)
        file.chmod(0o600)
    actors = ForkedActors(("one", "two"), lambda start: replace(start, secret_file=str(other)))
    with (
        executor_on(actors, PLAIN, secret_file=mine) as executor,
        pytest.raises(LaunchError, match=r"rank 0 on node .* did not prove to have the key.*Copy the same file"),
    ):
        executor.call("rank")
    assert actors.have_ended()


@pytest.mark.parametrize(("caller", "ranks"), [("one host", "another host"), ("", "")], ids=["several", "unknown"])
def test_hosts_that_have_nothing_to_know_one_another_by_do_not_start(
    monkeypatch: pytest.MonkeyPatch, caller: str, ranks: str
) -> None:
    monkeypatch.setattr(remote_worker, "this_host", lambda: caller)
    monkeypatch.setattr(remote_rank, "this_host", lambda: ranks)
    actors = ForkedActors(("one", "two"))
    with executor_on(actors, PLAIN) as executor, pytest.raises(LaunchError, match=r"several hosts.*secret_file="):
        executor.call("rank")
    assert actors.have_ended()


def test_a_secret_that_a_node_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("5" * 64)
    file.chmod(0o600)
    actors = ForkedActors(("one",), lambda start: replace(start, secret_file=str(tmp_path / "nothing")))
    with (
        executor_on(actors, PLAIN, secret_file=file) as executor,
        pytest.raises(LaunchError, match=r"rank 0 cannot start: secret_file=.*No such file"),
    ):
        executor.call("rank")


def test_ranks_end_with_their_caller(tmp_path: Path) -> None:
    """Also if it is killed: their connection closes."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        executor = executor_on(ForkedActors(("one", "two")), PLAIN)
        executor.call("rank")
        os.write(writer, " ".join(map(str, executor.pids)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    pids = [int(pid) for pid in os.read(reader, 1000).split()]
    os.close(reader)
    os.close(writer)
    assert len(pids) == 2
    assert all_gone(pids)
