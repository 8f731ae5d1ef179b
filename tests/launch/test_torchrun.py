"""The same script under torchrun: every process is a rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from patchpar.errors import LaunchError
from patchpar.launch.torchrun import TorchrunExecutor, _Control, torchrun_world
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
        assert saw["rank"] == [rank if place == rank else None for place in range(2)]
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
    assert [saw["again"][rank] for rank, saw in enumerate(seen)] == [9.0, 9.0]


def test_no_thread_of_a_group_outlives_it(folder):
    """One that does may end the process: Python ends threads that want its lock when it is on its way out."""
    for rank in range(2):
        names = json.loads((folder / f"{rank}.threads.json").read_text())
        assert names
        assert not [name for name in names if "gloo" in name]


def test_a_group_that_went_with_the_default_one_is_left_in_peace():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    control = _Control()
    dist.destroy_process_group()
    control.leave()
    with pytest.raises(LaunchError, match="closed"):
        _ = control.group


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
