"""When ranks have a group of torch.distributed, through which backend, and what is said if it cannot be made."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from patchpar.errors import LaunchError
from patchpar.launch import default_group, torchrun_connection
from patchpar.launch.default_group import GroupRank, backend_for, check_default_group, form_group
from patchpar.launch.handshake import GroupStore
from patchpar.launch.nccl_failures import FAILURES_ARE_RAISED, name_in_torch
from patchpar.launch.time_limit import longest_wait
from tests.launch.fake_gpus import FakeGpus
from tests.launch.threads_as_ranks import ranks_of_torchrun

OWN = GroupRank(rank=0, world_size=2, device="cuda:0", deadline=3.0, timeout=9.0)


@pytest.fixture
def made(monkeypatch):
    """What torch is told to make as the default group, by rank."""
    made = {}
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **kwargs: made.update({kwargs["rank"]: (backend, kwargs)})
    )
    monkeypatch.setattr(default_group.atexit, "register", lambda function: None)
    return made


@pytest.mark.parametrize(
    ("cards", "backend"),
    [
        (["cuda A", "cuda B"], "nccl"),
        (["xpu A", "xpu B"], "xccl"),
        (["cuda A", "cuda A"], ""),
        (["cuda A", "cuda B", "cuda A"], ""),
        (["cuda A", ""], ""),
        (["cuda A"], ""),
        (["cuda A", "xpu B"], ""),
        (["mps A", "mps B"], ""),
        (["", ""], ""),
    ],
    ids=str,
)
def test_the_backend_goes_by_the_cards(cards, backend):
    assert backend_for(cards) == backend


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="elsewhere it has a name")
def test_the_file_of_a_store_is_closed_once():
    store = GroupStore()
    (descriptor,) = store.inherit
    os.fstat(descriptor)
    store.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    store.close()


@pytest.mark.parametrize("older", [False, True])
def test_rank_0_opens_the_store_at_a_port_that_it_has_kept(older, monkeypatch):
    """A port that is only looked up may be another process's by then. `older`: the store of torch 2.6 and 2.7."""
    monkeypatch.setattr(default_group, "TAKES_LISTENER", "99" if older else default_group.TAKES_LISTENER)
    listener = socket.create_server(("127.0.0.1", 0))
    where = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    first, second = (replace(OWN, rank=rank, device="cpu", deadline=20.0) for rank in (0, 1))
    store = default_group.store_at(where, first, listener)
    assert listener.fileno() < 0, "the store has it now"
    store.set("name", "value")
    assert default_group.store_at(where, second).get("name") == b"value"
    assert store.timeout == timedelta(seconds=20), "of a wait, and not of operations"


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_that_never_comes_is_named_at_the_deadline(kind, tmp_path, monkeypatch, made):
    """NCCL would wait for it without a limit: it is not begun with."""
    listener = socket.create_server(("127.0.0.1", 0)) if kind == "tcp" else None
    where = str(tmp_path / "store") if listener is None else f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    own = replace(OWN, world_size=4, deadline=0.3)
    store = default_group.store_at(where, own, listener)
    assert store.timeout == timedelta(seconds=0.3)
    other = replace(own, rank=2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(form_group, "nccl", default_group.store_at(where, other), other)
        start = time.monotonic()
        with pytest.raises(LaunchError, match=r"^rank 1, 3 has not come to the store .* within 0\.3 s: did it exit"):
            form_group("nccl", store, own)
        with pytest.raises(LaunchError, match=r"^rank 1, 3 has not come .*Rank 2 has waited"):
            waits.result()
    assert time.monotonic() - start < 5
    assert made == {}, "no rank has begun to connect"


def test_sharing_is_said(caplog):
    assert backend_for(["cuda A", "cuda B", "cuda A"]) == ""
    assert "3 ranks share 2 GPUs, which is slow: nccl needs one for each rank" in caplog.text


def test_ranks_that_see_one_gpu_each_have_one_each(monkeypatch, made):
    """As SLURM starts them: CUDA_VISIBLE_DEVICES names another card for each, and all of them are cuda:0."""
    gpus = [FakeGpus(["A"]), FakeGpus(["B"])]
    executors = ranks_of_torchrun(monkeypatch, gpus)
    for rank, executor in enumerate(executors):
        backend, kwargs = made[rank]
        assert backend == name_in_torch("nccl")
        assert kwargs["device_id"] == torch.device("cuda:0")
        assert kwargs["timeout"] == timedelta(seconds=longest_wait(20.0))
        assert executor.devices == ("cuda:0", "cuda:0")
        assert gpus[rank].log == ["set cuda:0"]
        executor.close()
    assert default_group.os.environ["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(("device", "found"), [("cpu", ["cpu", "cpu"]), ("cuda", ["cuda:1", "cuda:1"])])
def test_the_type_of_device_that_the_script_asks_for(monkeypatch, made, device, found):
    """Of GPUs it is still the one of LOCAL_RANK."""
    gpus = [FakeGpus(["A", "B"]), FakeGpus(["C", "D"])]
    for executor in ranks_of_torchrun(monkeypatch, gpus, local_rank=1, device=device):
        assert list(executor.devices) == found
        executor.close()
    assert bool(made) is (device == "cuda")


def test_a_type_of_device_that_is_not_there(monkeypatch):
    for error in ranks_of_torchrun(monkeypatch, [FakeGpus([])] * 2, device="cuda"):
        assert isinstance(error, LaunchError)
        assert "device='cuda': this process sees no device of this type: use 'cpu'" in str(error)


def test_each_group_has_a_part_of_the_store_of_its_own(monkeypatch, made):
    """A script may end the first one: what it has left there would be read by the next, which would hang."""
    store, stores = dist.HashStore(), []
    monkeypatch.setenv("MASTER_PORT", "of this test")
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([(store, 0, 1)]))
    alone = replace(OWN, world_size=1, device="cpu")
    for _ in range(2):
        default_group.form_group_between_hosts(alone)
        stores.append(made[0][1]["store"])
    stores[0].set("address", "of the first group")
    assert [each.check(["address"]) for each in stores] == [True, False]


def test_ranks_that_see_the_same_gpu_share_it(monkeypatch, made):
    for executor in ranks_of_torchrun(monkeypatch, [FakeGpus(["A"]), FakeGpus(["A"])]):
        executor.close()
    assert made == {}


def test_ranks_of_several_hosts_tell_their_cards_before_they_have_a_group(monkeypatch, made):
    class Stop(Exception):
        pass

    def no_control():
        raise Stop

    monkeypatch.setattr(torchrun_connection, "GroupControl", no_control)
    for cards, backend in [("AB", "nccl"), ("AA", "gloo")]:
        found = ranks_of_torchrun(monkeypatch, [FakeGpus([card]) for card in cards], one_host=False)
        assert [type(error) for error in found] == [Stop, Stop]
        assert [made[rank][0] for rank in range(2)] == [name_in_torch(backend)] * 2
        assert made[0][1]["device_id"] == (torch.device("cuda:0") if backend == "nccl" else None)


def test_a_gpu_that_cannot_be_reached_fails_at_the_start(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("ncclSystemError: no interface found")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(
        LaunchError, match=r"rank 0 \(cuda:0\) cannot connect .* nccl: .*no interface.*NCCL_SOCKET_IFNAME"
    ):
        form_group("nccl", dist.HashStore(), replace(OWN, world_size=1))


def test_ranks_that_nccl_does_not_connect_fail_within_the_deadline(monkeypatch):
    """Its call returns when all have connected: one may end between the store and that, or be out of reach."""
    blocked = threading.Event()
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: blocked.wait(60))
    with ThreadPoolExecutor(1) as thread:
        formed = thread.submit(form_group, "nccl", dist.HashStore(), replace(OWN, world_size=1, deadline=0.3))
        try:
            with pytest.raises(
                LaunchError, match=r"rank 0 \(cuda:0\) cannot connect .* not over within 0\.3 s.*IFNAME"
            ):
                formed.result(timeout=20)
        finally:
            blocked.set()


@pytest.mark.parametrize("name", ["nccl", "nccl-legacy"])
def test_the_group_is_of_the_implementation_of_nccl_that_has_been_tried(monkeypatch, made, name):
    """From torch 2.15 on "nccl" is another one, and the one of before has a name of its own."""
    monkeypatch.setattr(dist, "is_backend_available", {"nccl", name}.__contains__)
    form_group("nccl", dist.HashStore(), replace(OWN, world_size=1))
    assert made[0][0] == name


def test_torch_does_not_end_the_process_where_nccl_fails(monkeypatch):
    """The thread of the default group would, eight minutes after a failure in any group of any rank."""
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    before, found = dict(os.environ), {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.update(os.environ))
    form_group("nccl", dist.HashStore(), replace(OWN, world_size=1))
    assert FAILURES_ARE_RAISED.items() <= found.items()
    assert dict(os.environ) == before, "groups of the script keep its settings"


def test_a_store_that_cannot_be_reached_is_said(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=r"rank 0 cannot reach torchrun's store within 3 s: .*MASTER_"):
        default_group.form_group_between_hosts(OWN)


@pytest.fixture
def silent(monkeypatch):
    """A program that has the port of torchrun's store, and says nothing to whoever connects. Returns the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield port


def test_another_program_at_the_port_of_the_store_is_not_waited_for(silent):
    """torch itself waits without a limit for the first answer of what has accepted its connection."""
    own = replace(OWN, rank=1, device="cpu", deadline=1.0)
    with pytest.raises(LaunchError, match=rf"rank 1 .* within 1 s: what listens at 127.0.0.1:{silent} does not answer"):
        default_group.form_group_between_hosts(own)


def test_a_port_that_another_program_has_is_named(silent):
    with pytest.raises(LaunchError, match=rf"rank 0 .*: another program has port {silent}: .*--master-port"):
        default_group.form_group_between_hosts(replace(OWN, device="cpu"))


def test_a_host_that_nobody_knows_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    own = replace(OWN, rank=1, device="cpu", deadline=1.0)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=nowhere.invalid is no name of a machine"):
        default_group.form_group_between_hosts(own)


def test_a_group_of_the_script_that_needs_a_gpu_each(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    with pytest.raises(LaunchError, match=r"ranks \[0, 2\] share GPUs, .* nccl, .*initialise it with 'gloo'"):
        check_default_group("cuda:0", ["cuda A", "cuda B", "cuda A"])
    check_default_group("cuda:0", ["cuda A", "cuda B"])
    check_default_group("cpu", ["", ""])
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    check_default_group("cuda:0", ["cuda A", "cuda A"])
