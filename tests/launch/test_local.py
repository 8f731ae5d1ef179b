"""Two workers that are well: calls, results, events, questions, and what is shared."""

import io
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from patchpar.errors import LaunchError, PlanError
from patchpar.launch.anonymous_file import anonymous_file
from patchpar.launch.devices import available_cores
from patchpar.launch.handshake import needs_group, threads_per_rank, worker_environment
from patchpar.launch.heartbeat import Heartbeat, HeartbeatReader
from patchpar.launch.local import LocalExecutor
from tests.launch.conftest import PLAIN, TOY


def test_every_rank_answers_at_its_index(pool):
    assert pool.kind == "local"
    assert pool.devices == ("cpu", "cpu")
    assert pool.world_size == 2
    assert pool.call("rank") == [0, 1]


def test_ranks_can_talk(pool):
    assert pool.call("add_up", 10) == [21.0, 21.0]


def test_workers_know_their_rank(pool):
    for rank, facts in enumerate(pool.call("facts")):
        assert (facts["rank"], facts["world_size"], facts["device"]) == (rank, 2, "cpu")
        assert facts["pid"] == pool.pids[rank] != os.getpid()
        assert facts["cwd"] == str(Path.cwd())
        assert set(sys.path) <= set(facts["path"])
        assert str(facts["threads"]) == facts["omp"]
        assert facts["threads"] <= max(1, available_cores() // 2)


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_rank(8, workers) for workers in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_per_rank(8, 2) == 2
    assert threads_per_rank(8, 8) == 1


def test_workers_do_not_take_themselves_for_ranks_of_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    for name in ("LOCAL_MODELS", "GROUP_TOKEN", "ROLE_ARN"):
        monkeypatch.setenv(name, "the user's own")
    environment = worker_environment(3)
    assert [environment.get(name) for name in ("LOCAL_MODELS", "GROUP_TOKEN", "ROLE_ARN")] == ["the user's own"] * 3
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(("interfaces", "chosen"), [("eth0 lo", "lo"), ("en0 lo0", "lo0"), ("eth0", None)])
def test_nccl_meets_over_loopback_where_there_is_one_and_nobody_says_otherwise(monkeypatch, interfaces, chosen):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(interfaces.split())))
    assert worker_environment(1).get("NCCL_SOCKET_IFNAME") == chosen
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    assert worker_environment(1)["NCCL_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ("cuda:0 cuda:1", True),
        ("cuda:0 cuda:0", False),
        ("cuda:0", False),
        ("xpu:0 xpu:1", True),
        ("cpu cpu", False),
        ("cpu", False),
    ],
)
def test_only_gpus_of_their_own_have_a_group(devices, wanted):
    assert needs_group(tuple(devices.split())) is wanted


def test_values_of_every_kind_go_there_and_back(pool):
    generator = torch.Generator().manual_seed(3)
    noise = np.random.default_rng(0).integers(0, 255, (600, 500, 3), dtype=np.uint8)
    sent = {"x": torch.randn(300, 400), "n": noise, "p": PIL.Image.fromarray(noise), "text": "ä", "none": None}
    for args, kwargs in pool.call("echo", 1, (2, 3), **sent):
        assert args == (1, (2, 3))
        assert torch.equal(kwargs["x"], sent["x"])
        assert np.array_equal(kwargs["n"], noise)
        assert kwargs["p"].tobytes() == sent["p"].tobytes()
        assert (kwargs["text"], kwargs["none"]) == ("ä", None)
    expected = torch.randn(4, generator=torch.Generator().manual_seed(3))
    assert all(torch.equal(generated, expected) for generated in pool.call("generate", generator))


def test_what_one_rank_changes_the_others_do_not_see(pool):
    """Both ranks map the same memory, and both write to it."""
    tensor, array = torch.zeros(1 << 18), np.zeros(1 << 18)
    assert pool.call("change_in_place", tensor, array) == [(0.0, 0.0), (float(1 << 18), float(1 << 18))]
    assert tensor.sum() == array.sum() == 0


def test_a_module_travels_and_is_each_ranks_own(pool):
    module = torch.nn.Linear(300, 300)
    x = torch.ones(1, 300)
    with torch.no_grad():
        plain = module(x)
    first, second = pool.call("module_output", module, x)
    assert torch.allclose(first, plain, atol=1e-4)
    assert torch.allclose(second, plain + 301, atol=1e-2)


def test_events_come_in_order_before_the_result(pool):
    heard = []
    assert pool.call("count", 200, on_event=lambda rank, event: heard.append((rank, event["index"]))) == [200, 200]
    assert sorted(heard) == [(rank, index) for rank in (0, 1) for index in range(200)]
    for rank in (0, 1):
        assert [index for who, index in heard if who == rank] == list(range(200))
    assert pool.call("count", 2) == [2, 2], "nobody has to listen"


def test_the_callers_reply_to_rank_0_reaches_all(pool):
    questions = []

    def double(question):
        questions.append(question["value"].tolist())
        return question["value"] * 2

    assert pool.call("converse", 3, on_ask=double) == [[8.0, 8.0], [8.0, 8.0]]
    assert questions == [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]


def test_large_replies(pool):
    big = torch.full((1 << 20,), 2.0)
    values = pool.call("converse", 1, on_ask=lambda question: big)
    assert [sum(value) for value in values] == [float(1 << 21)] * 2


def test_expected_time_lengthens_the_deadline(pool):
    deadlines = [facts["deadline"] for facts in pool.call("facts", expected=4.0)]
    assert deadlines == [6.0, 6.0]


def test_work_longer_than_the_deadline_is_fine_while_it_gets_on(pool):
    pids = pool.pids
    assert pool.call("work", 6, 0.4) == [6, 6]
    assert pool.call("sleep", 2.2, expected=2.0) == [None, None]
    assert pool.pids == pids


def test_a_slow_callback_makes_nobody_late(pool):
    pids = pool.pids

    def think(question):
        time.sleep(2.2)
        return question["value"]

    pool.call("converse", 1, on_ask=think)
    assert pool.pids == pids


def test_calls_from_several_threads_take_turns(pool):
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append((n, pool.call("add_up", n)))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [(n, [2.0 * n + 1] * 2) for n in range(8)]


def test_an_argument_that_cannot_be_sent_is_refused_before_anything_runs(pool):
    pids = pool.pids
    with pytest.raises(PlanError, match="echo: argument 'lock'"):
        pool.call("echo", lock=threading.Lock())
    assert pool.pids == pids
    assert pool.call("rank") == [0, 1]


def test_a_small_call_costs_little(pool):
    pool.call("rank")

    def seconds_of_ten() -> float:
        start = time.perf_counter()
        for _ in range(10):
            pool.call("rank")
        return time.perf_counter() - start

    assert min(seconds_of_ten() for _ in range(5)) < 0.5


def test_what_workers_print_comes_to_our_stderr_once(pool, capfd, monkeypatch):
    printed = io.StringIO()  # what comes while capfd reads its file is lost
    monkeypatch.setattr(sys, "stderr", printed)
    pool.call("talk", "a library's warning")
    give_up = time.monotonic() + 20
    while not all(f"from {rank}" in printed.getvalue() for rank in range(2)) and time.monotonic() < give_up:
        time.sleep(0.01)
    lines = sorted(printed.getvalue().splitlines())
    assert lines == ["a library's warning", "a library's warning from 0", "a library's warning from 1"]
    assert capfd.readouterr().out == ""


def test_two_pools_live_side_by_side(pool):
    with LocalExecutor(["cpu", "cpu"], TOY, deadline=3.0) as other:
        other.start()
        assert pool.call("add_up", 1) == [3.0, 3.0]
        assert other.call("add_up", 2) == [5.0, 5.0]
        assert other.call("what_is_loaded") == [[], []]
        assert not set(other.pids) & set(pool.pids)
    assert pool.call("rank") == [0, 1]


def test_the_calling_process_does_not_import_torch():
    code = f"""
import sys
from patchpar.launch.local import LocalExecutor
with LocalExecutor(["cpu"], "{PLAIN}") as pool:
    assert pool.call("rank") == [0]
    assert pool.call("count", 2, on_event=lambda rank, event: None) == [2]
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_cannot_be_started_is_said():
    with pytest.raises(LaunchError, match="at least one device is needed"):
        LocalExecutor([], PLAIN)
    with (
        LocalExecutor(["cpu"], PLAIN, preload=["no.such.module"]) as executor,
        pytest.raises(LaunchError, match=r"cannot import 'no\.such\.module' of preload: No module named 'no'"),
    ):
        executor.call("rank")


def test_closing_twice_is_harmless_and_final():
    executor = LocalExecutor(["cpu"], PLAIN)
    executor.close()
    executor.close()
    for use in (executor.start, lambda: executor.call("rank")):
        with pytest.raises(LaunchError, match="closed"):
            use()


def test_a_mark_is_cheap_and_readable_from_outside():
    fd = anonymous_file("test")
    reader = HeartbeatReader(fd)
    heartbeat = Heartbeat(fd)
    os.close(fd)
    assert (reader.sign.beats, reader.where) == (0, "")
    heartbeat.beat("down.0.conv")
    heartbeat.beat("up.1.attention")
    heartbeat.beat("down.0.conv")
    assert (reader.sign.beats, reader.where) == (3, "down.0.conv")
    best = min(_seconds_of_beats(heartbeat, 2000) for _ in range(20)) / 2000
    assert best < 1e-6
    for number in range(20_000):
        heartbeat.beat(f"a place that is new each time {number}")
    assert reader.where == "a place that is new each time 19999"
    heartbeat.beat("ü" * 500)
    assert reader.where.startswith("ü" * 99)


def test_a_rank_waits_while_its_process_or_its_stream_does():
    fd = anonymous_file("test")
    reader, heartbeat = HeartbeatReader(fd), Heartbeat(fd)
    os.close(fd)
    heartbeat.waiting.set_stream_waiting(True)
    assert reader.sign.waits
    with heartbeat.waiting:
        heartbeat.waiting.set_stream_waiting(False)
        assert reader.sign.waits
    assert not reader.sign.waits


def _seconds_of_beats(heartbeat, number):
    start = time.perf_counter()
    for _ in range(number):
        heartbeat.beat("up.1.attention")
    return time.perf_counter() - start
