"""The same script under torchrun: every process is a rank."""

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from patchpar.errors import LaunchError, PlanError
from patchpar.launch.control_group import GroupControl
from patchpar.launch.default_group import GroupRank
from patchpar.launch.executor import Callbacks
from patchpar.launch.messages import unpack
from patchpar.launch.shared_secret import NetworkTrust
from patchpar.launch.torchrun import TorchrunContext, TorchrunExecutor
from patchpar.launch.torchrun_connection import TorchrunConnection, connect_ranks
from patchpar.launch.torchrun_variables import torchrun_world
from tests.forked import forked
from tests.launch.conftest import TOY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks have written what they saw."""
    folder = tmp_path_factory.mktemp("torchrun")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.launch.torchrun_script", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(params=[0, 1], ids=["first executor", "second executor, same group"])
def seen(request, results):
    """What each rank saw."""
    return [of_rank[request.param] for of_rank in results]


def test_every_process_is_a_rank(seen):
    for rank, saw in enumerate(seen):
        assert (saw["world"], saw["kind"], saw["devices"]) == (2, "torchrun", ["cpu", "cpu"])
        assert saw["rank"] == [rank if group_rank == rank else None for group_rank in range(2)]
        assert saw["add_up"][rank] == 7.0


def test_rank_0_is_called_back_and_answers_for_all(seen):
    assert seen[0]["events"] == [[0, {"index": index}] for index in range(3)]
    assert seen[1]["events"] == []
    assert seen[0]["questions"] == [0, 1]
    assert seen[1]["questions"] == []
    assert seen[0]["converse"][0] == seen[1]["converse"][1] == [4.0, 4.0]


def test_an_exception_anywhere_is_one_everywhere(seen):
    assert [saw["all raise"] for saw in seen] == [["ValueError", "alike"]] * 2
    assert seen[0]["rank 1 raises"] == ["WorkerError", "fail: rank 1 (cpu) raised ValueError: only one"]
    assert seen[1]["rank 1 raises"] == ["ValueError", "only one"]
    assert seen[0]["caller raises"] == ["Strange", "the caller's own"]
    assert seen[1]["caller raises"][0] == "WorkerError"
    assert "Strange: the caller's own" in seen[1]["caller raises"][1]
    for saw in seen:
        kind, text = saw["other prompts"]
        assert kind == "ArgumentMismatch"
        assert text.startswith("echo: argument 'prompt' differs: 'a dog' on rank 0, 'a cat' on rank 1. Under torchrun")
        assert saw["other methods"][1].startswith("the call differs: rank on rank 0, load on rank 1")
    assert [saw["again"][rank] for rank, saw in enumerate(seen)] == [9.0, 9.0]


def test_ranks_cannot_be_told_anything_during_a_call(seen):
    for saw in seen:
        assert saw["is told"][0] == "LaunchError"
        assert "under torchrun no messages can be sent to ranks" in saw["is told"][1]
        assert saw["again"], "the ranks are still in step"


def test_a_rank_that_leaves_the_script_is_named(folder):
    kind, text = json.loads((folder / "left.json").read_text())
    assert kind == "WorkerDied"
    assert text.startswith("rank 1 has gone: its process has ended")


def test_ranks_of_one_host_neither_listen_nor_have_a_group(results):
    assert [seen[0]["listening"] for seen in results] == [[], []]
    assert [seen[0]["has group"] for seen in results] == [False, False]
    assert [seen[1]["has group"] for seen in results] == [True, True], "the second time the script has made one"


@pytest.mark.breadth
def test_no_thread_of_a_group_outlives_it(tmp_path):
    """One that does may end the process: Python ends threads that want its lock when it is on its way out."""
    run_ranks(tmp_path, "tests.launch.several_hosts", 2, LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["add_up"][rank] == 7.0
        assert found["backend"] == "gloo"
        assert found["prompt"][0] == "ArgumentMismatch"
        assert found["links"], "one host all the same, as it turned out"
        assert any("gloo" in name for name in found["threads"])
        names = json.loads((tmp_path / f"{rank}.threads.json").read_text())
        assert names
        assert not [name for name in names if "gloo" in name]


@pytest.fixture(scope="module")
def distant(tmp_path_factory):
    """What two ranks saw that are on a host each, as far as they know."""
    folder = tmp_path_factory.mktemp("distant")
    fork_ranks(folder, "tests.launch.distant_hosts", 2, LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_on_several_hosts_know_one_another_by_a_secret(distant):
    for rank, saw in enumerate(distant):
        assert saw["backend"] == "gloo"
        cases = {"secret": True, "trusted": False, "secret again": True, "in a new group": True}
        for name, is_sealed in cases.items():
            found = saw[name]
            assert found["sealed"] == [is_sealed, is_sealed]
            assert found["links"] is False, "they do not share a host"
            assert found["add_up"] == 7.0
            assert found["converse"] == [4.0, 4.0]
            kind, text = found["rank 1 raises"]
            assert (kind, "only one" in text) == (["WorkerError", "ValueError"][rank], True)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nothing given", ["would unpickle, and so run, whatever is sent to them"] * 2),
        ("one has none", ["rank 0 (on {host}) has a secret_file and rank 1 (on {host}) has none"] * 2),
        ("one trusts", ["rank 1 (on {host}) has a secret_file and rank 0 (on {host}) has none"] * 2),
        ("another secret", ["rank 1 (on {host}) did not prove", "rank 0 (on {host}) did not prove"]),
        ("others may read it", ["rank 1 (on {host}) cannot use its secret", "mode 0644 lets others"]),
        ("short", ["rank 1 (on {host}) cannot use its secret", "has 32 to 4096 bytes, this one has 31"]),
    ],
)
def test_ranks_that_do_not_know_one_another_do_not_start(distant, case, words):
    for saw, text in zip(distant, words, strict=True):
        assert text.format(host=socket.gethostname()) in saw[case][1]


def test_a_rank_that_refuses_a_message_is_not_waited_for(distant):
    """The second to refuse may find that the first has gone."""
    calls = [saw["tampered"] for saw in distant]
    assert "AuthenticationError" in {first for (first, _), _ in calls} <= {"AuthenticationError", "WorkerDied"}
    assert {second for _, (second, _) in calls} <= {"LaunchError", "WorkerDied"}, "nothing further between them"


def test_a_rank_that_dies_in_a_call_is_named_on_all_others(tmp_path):
    fork_ranks(tmp_path, "tests.launch.dying_rank", 3, codes=[0, 0, 7])
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        kind, text, number = found["first"]
        assert (kind, number) == ("WorkerDied", 2), text
        assert "rank 2 has gone" in text
        assert f"die; rank {rank} was at 'all-reduce'" in text
        assert found["next"][0] == "WorkerDied"


def variables_of_ranks(world, environment):
    """What torchrun would set for each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    return [{**base, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment} for rank in range(world)]


def fork_ranks(folder, module, world, codes=None, **environment):
    """As `run_ranks`, in children of this process: a Python of its own would import torch anew."""

    def run(variables):
        os.environ.update(variables)
        sys.argv[1:] = [str(folder)]
        runpy.run_module(module, run_name="__main__")

    with ExitStack() as stack:
        ranks = [
            stack.enter_context(forked(partial(run, variables), folder / f"{variables['RANK']}.errors"))
            for variables in variables_of_ranks(world, environment)
        ]
        found = [rank.code(within=120) for rank in ranks]
        assert found == (codes or [0] * world), [rank.errors() for rank in ranks]


def run_ranks(folder, module, world, **environment):
    """Start what torchrun would, without what it does when one of them fails."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            env={**os.environ, **variables},
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in variables_of_ranks(world, environment)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, errors


def test_a_group_that_went_with_the_default_one_is_left_in_peace():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    control = GroupControl()
    dist.destroy_process_group()
    control.leave()
    with pytest.raises(LaunchError, match="closed"):
        _ = control.group


def test_other_ranks_are_told_of_a_reply_that_cannot_be_sent():
    """They wait for the reply: between hosts rank 0 would go on to another collective than theirs."""

    class Control:
        sent = None

        def broadcast(self, data):
            self.sent = unpack(data)

    control = Control()
    context = TorchrunContext(0, ("cpu", "cpu"), TorchrunConnection(control))
    context.callbacks = Callbacks(on_ask=lambda question: {question: threading.Lock()})
    with pytest.raises(TypeError, match="lock") as found:
        context.ask("what")
    assert control.sent == (False, f"TypeError in the caller's on_ask: {found.value}")


def test_outside_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_world() is None
    with pytest.raises(LaunchError, match="was not started by torchrun"):
        TorchrunExecutor(TOY)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert torchrun_world() is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert torchrun_world() == 3


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("0", "0")])
def test_a_rank_beyond_the_world_is_refused_at_once(rank, world, monkeypatch):
    """As where WORLD_SIZE is the number of nodes. It would wait for the deadline, and say that rank 0 has not come."""
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(LaunchError, match=rf"RANK={rank} and WORLD_SIZE={world}: ranks go from 0 to WORLD_SIZE - 1"):
        TorchrunExecutor(TOY, deadline=0.5, device="cpu")


def test_a_secret_that_cannot_be_used_is_refused_where_none_is_needed_too(monkeypatch):
    """On one host: or the caller would believe that it is in use, until ranks are on several."""
    for name, value in {"MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    own = GroupRank(rank=0, world_size=1, device="cpu", deadline=5.0, timeout=5.0)
    with pytest.raises(PlanError, match="mode 0644"):
        connect_ranks(own, 5.0, NetworkTrust(problem="the secret file has mode 0644"))
