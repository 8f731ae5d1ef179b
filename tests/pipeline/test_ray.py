"""Ranks on a Ray cluster of two nodes, both on this machine: equal to one process, also if a node is lost meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchpar import LaunchError, ParallelPipeline
from tests.launch.conftest import all_gone
from tests.launch.forked_actors import ForkedActors, executor_on
from tests.pipeline.conftest import EXACT, QUICK, generator, relative_error, tensor_of
from tests.tensors import psnr_db

SECONDS = 240.0
LONG = pytest.mark.timeout(900)
"""Ray takes a minute to start where the machine does other work."""
CALL = {**QUICK, "num_inference_steps": 6, "output_type": "latent"}
START_SECONDS = 300
"""For a node of Ray on a machine that does other work, too."""
SCRIPT = """
import sys
from patchpar import ParallelPipeline
with ParallelPipeline.from_pretrained(sys.argv[1], devices="ray:2", verify=sys.argv[2]) as pipe:
    print(*pipe._executor.pids, flush=True)
    pipe("a small red house", height=128, width=128, num_inference_steps=900, output_type="latent")
"""


def lose(job: Any, what: Any, *args: Any, **options: Any) -> None:
    """Lose ranks after two steps of a job."""
    while job.progress.step < 2:
        assert not job.is_over
        time.sleep(0.01)
    what(*args, **options)


def test_a_rank_on_another_node_is_lost(
    plain: Any, sdxl_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray: processes in place of its actors. The rank that is left ends the job, and the next call has two."""
    actors = ForkedActors(("one", "two"))
    monkeypatch.setattr(
        "patchpar.pipeline.startup.RayExecutor", lambda _, engine, **__: executor_on(actors, engine, deadline=30.0)
    )
    want = plain(**CALL, generator=generator())
    with ParallelPipeline.from_pretrained(sdxl_folder, devices="ray:2", verify=tmp_path) as pipe:
        assert repr(pipe).endswith("2 ranks on a Ray cluster; plan auto: chosen at the first call>")
        job = pipe.submit(**CALL, plan="patch=2", generator=generator())
        lose(job, os.kill, pipe._executor.pids[1], signal.SIGKILL)
        assert relative_error(job.result(SECONDS), want) <= EXACT
        assert (job.retries, job.reason[:11]) == (1, "rank 1 lost")
        assert [each.rank for each in job.run.ranks] == [0]
        pipe.plan = "cfg=2"
        assert relative_error(pipe(**CALL, generator=generator()), want) <= EXACT
        assert len(actors.all) == 3
    assert actors.have_ended()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node of one core, to which tests add others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_raylet_start_wait_time_s", str(START_SECONDS))
        patch.setenv("RAY_worker_niceness", "0")  # else other tests of this machine hold the ranks up
        import ray
        from ray.cluster_utils import Cluster

        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", found.address)
        yield found
        ray.shutdown()
        found.shutdown()


@pytest.fixture
def node(cluster: Any) -> Iterator[Any]:
    """A second node of one core."""
    added = cluster.add_node(num_cpus=1)
    yield added
    if added in cluster.list_all_nodes():
        cluster.remove_node(added)


def free_cores(cluster: Any) -> float:
    import ray

    return ray.available_resources().get("CPU", 0.0)


@LONG
@pytest.mark.breadth
def test_more_ranks_than_the_cluster_has(cluster: Any, sdxl_folder: Path) -> None:
    message = r"devices='ray:3': the Ray cluster has 1 CPUs on 1 node, .*: use at most 'ray:1', or add nodes"
    with pytest.raises(LaunchError, match=message):
        ParallelPipeline.from_pretrained(sdxl_folder, devices="ray:3")


@LONG
@pytest.mark.breadth
@pytest.mark.usefixtures("node")
def test_two_nodes_equal_one_process(cluster: Any, plain: Any, sdxl_folder: Path, tmp_path: Path) -> None:
    call = {**QUICK, "output_type": "pt"}
    want = tensor_of(plain(**call, generator=generator()))
    with ParallelPipeline.from_pretrained(sdxl_folder, devices="ray:2", verify=tmp_path) as pipe:
        for plan in ("patch=2", "cfg=2"):
            pipe.plan = plan
            assert psnr_db(tensor_of(pipe(**call, generator=generator())), want) >= 130
        lines = [sum(each.bytes_sent.values()) for each in pipe.last_run.ranks]
        pids = pipe._executor.pids
    assert min(lines) > 0
    assert all_gone(pids)


@LONG
@pytest.mark.breadth
def test_a_node_is_lost(cluster: Any, node: Any, plain: Any, sdxl_folder: Path, tmp_path: Path) -> None:
    """Its job ends with the right latents; a call that needs all ranks says what is missing."""
    want = plain(**CALL, generator=generator())
    with ParallelPipeline.from_pretrained(sdxl_folder, devices="ray:2", verify=tmp_path, deadline=60.0) as pipe:
        job = pipe.submit(**CALL, plan="patch=2", generator=generator())
        lose(job, cluster.remove_node, node, allow_graceful=False)
        assert relative_error(job.result(SECONDS), want) <= EXACT
        assert job.retries == 1
        assert len(job.run.ranks) == 1
        with pytest.raises(LaunchError, match="the Ray cluster has 1 CPUs on 1 node"):
            pipe.submit(**CALL, plan="patch=2").result(SECONDS)


@LONG
@pytest.mark.breadth
def test_a_node_comes_in_place_of_a_lost_one(
    cluster: Any, node: Any, plain: Any, sdxl_folder: Path, tmp_path: Path
) -> None:
    want = plain(**CALL, generator=generator())
    with ParallelPipeline.from_pretrained(sdxl_folder, devices="ray:2", verify=tmp_path, deadline=60.0) as pipe:
        before = pipe._executor.pids
        cluster.remove_node(node, allow_graceful=False)
        added = cluster.add_node(num_cpus=1)
        again = pipe.submit(**CALL, plan="patch=2", generator=generator())
        assert relative_error(again.result(SECONDS), want) <= EXACT
        assert len(again.run.ranks) == 2
        pids = pipe._executor.pids
        assert len({*before, *pids}) == 3
    assert all_gone(pids)
    cluster.remove_node(added)


@LONG
@pytest.mark.breadth
@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_nothing_is_left_of_a_program_that_ends(
    cluster: Any, sdxl_folder: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    """By ctrl-C, or killed, in a call."""
    command = [sys.executable, "-c", SCRIPT, str(sdxl_folder), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        line = next(each for each in program.stdout if each.split() and each.split()[0].isdigit())
        time.sleep(2.0)
        program.send_signal(sign)
        _, errors = program.communicate(timeout=SECONDS)
    assert program.returncode != 0
    assert sign is signal.SIGKILL or "KeyboardInterrupt" in errors
    assert all_gone([int(pid) for pid in line.split()], within=60.0)


@LONG
@pytest.mark.breadth
@pytest.mark.usefixtures("node")
def test_the_command_line(cluster: Any, sdxl_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "house.png"
    command = [sys.executable, "-m", "patchpar", "generate", "a small red house", "--model", str(sdxl_folder)]
    options = [
        "--devices",
        "ray:2",
        "--plan",
        "cfg=2",
        "--steps",
        "2",
        "--height",
        "128",
        "--width",
        "128",
        "--output",
        str(file),
    ]
    subprocess.run([*command, *options], check=True, timeout=SECONDS)
    assert file.stat().st_size > 1000
