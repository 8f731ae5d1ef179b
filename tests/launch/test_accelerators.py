"""What torch says of accelerators and their groups, on a machine without any."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from patchpar.errors import LaunchError
from patchpar.launch.accelerators import (
    card_id,
    current_device,
    default_backend,
    device_count,
    group_backend,
    main_kind,
    random_state,
    random_width,
    select_device,
    set_random_state,
    used_device,
)
from tests.launch.fake_gpus import FakeGpus, pretend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def group():
    """Make the default group of one rank; destroyed at the end."""

    def make(backend):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "message", "of_gpu"),
    [
        (None, "undefined", "nccl" if dist.is_nccl_available() else "gloo"),
        ("gloo", "gloo", "gloo"),
        ("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:gloo", "gloo"),
    ],
    ids=str,
)
def test_the_backend_of_a_device(group, backend, message, of_gpu):
    group(backend)
    assert dist.get_backend() == message
    assert group_backend(CPU) == "gloo"
    assert group_backend(GPU) == of_gpu


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cuda:nccl"])
def test_a_group_of_several_backends(monkeypatch, config):
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert group_backend(GPU) == "nccl"


def test_a_group_of_other_devices(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(LaunchError, match=r"group of torch.distributed \(cuda:nccl\) cannot carry tensors of cpu"):
        group_backend(CPU)


def test_this_machine():
    found = [device_count(kind) for kind in ("cuda", "xpu", "npu", "mps")]
    assert any(found) == torch.accelerator.is_available()
    assert device_count("nothing") == 0


@pytest.mark.parametrize(("kind", "main"), [("cuda", "cuda"), ("xpu", "xpu"), ("npu", "npu"), ("mps", "")])
def test_the_accelerators_of_a_machine(monkeypatch, kind, main):
    pretend(monkeypatch, FakeGpus(["A", "B"]), kind)
    assert main_kind() == main
    assert device_count(kind) == 2


def test_the_default_backend_is_that_of_torch():
    assert [default_backend(kind) for kind in ("cuda", "xpu", "mps", "npu")] == ["nccl", "xccl", "gloo", "gloo"]


def test_a_card_is_known_by_its_id_and_not_by_its_index(monkeypatch):
    pretend(monkeypatch, FakeGpus(["A", "B"]))
    assert card_id("cuda:1") == "cuda B"
    assert card_id("cpu") == ""
    pretend(monkeypatch, FakeGpus(["B"]))
    assert card_id("cuda:0") == "cuda B"


def test_cards_without_ids_are_told_apart_on_one_host_only(monkeypatch):
    pretend(monkeypatch, FakeGpus([None, None]))
    assert card_id("cuda:0") != card_id("cuda:1")
    assert card_id("cuda:0").startswith("cuda cuda:0 of ")


def test_the_current_device(monkeypatch):
    gpus = pretend(monkeypatch, FakeGpus(["A", "B"]))
    for device in ("cpu", "cuda:1", "cuda"):
        select_device(device)
        with current_device(device):
            gpus.log.append("work")
    inside = ["work", "set cuda:1", "enter cuda:1", "work", "leave cuda:1", "enter cuda", "work", "leave cuda"]
    assert gpus.log == inside


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_random_states(monkeypatch, kind):
    """Of "mps" there is one device, so that torch's functions take none."""
    gpus = pretend(monkeypatch, FakeGpus(["A", "B"]), kind)
    state, asked = torch.arange(4, dtype=torch.uint8), []
    gpus.get_rng_state = lambda *device: (asked.append(device), state)[1]
    gpus.set_rng_state = lambda given, *device: asked.append((given, *device))
    gpus.is_initialized = lambda: True
    if kind == "mps":
        monkeypatch.delattr(FakeGpus, "set_device")
    of_device = torch.device(kind, 1)
    names = (of_device,) if kind == "cuda" else ()
    assert random_state(of_device) is state
    set_random_state(state, of_device)
    assert asked == [names, (state, *names)]
    assert random_state(torch.device("cpu")) is None
    assert used_device() == torch.device(kind)
    gpus.is_initialized = lambda: False
    assert used_device() is None


def test_how_many_values_a_gpu_samples_side_by_side(monkeypatch):
    """108 multiprocessors of an A100 with 2,048 threads each."""
    gpus = pretend(monkeypatch, FakeGpus(["A"]))
    assert random_width("cpu") == random_width("cuda:0") == 0, "not known"
    found = SimpleNamespace(multi_processor_count=108, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(gpus, "get_device_properties", lambda device: found)
    assert random_width("cuda:0") == 221_184
