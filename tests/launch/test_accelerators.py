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
    kind_of_card,
    main_kind,
    pin_host_memory,
    random_state,
    random_width,
    select_device,
    set_random_state,
    untaken_fraction,
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
        (None, "undefined", "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"),
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


@pytest.mark.parametrize(
    "config", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cuda:nccl", "cuda:nccl-legacy", "cuda:nccl2"]
)
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


def test_a_card_on_two_hosts_of_nccl_is_two(monkeypatch):
    """NCCL compares hosts and buses, and its environment may name the host."""
    pretend(monkeypatch, FakeGpus(["A", "B"]))
    found = set()
    for host in ("one", "one", "other"):
        monkeypatch.setenv("NCCL_HOSTID", host)
        found.add(card_id("cuda:0"))
    assert len(found) == 2
    assert {kind_of_card(card) for card in found} == {"cuda"}
    assert card_id("cpu") == ""


def test_the_part_of_the_memory_that_nobody_has_taken(monkeypatch):
    gpus = pretend(monkeypatch, FakeGpus(["A", "B"]))
    assert untaken_fraction(torch.device("cuda:1")) == 0, "not known"
    monkeypatch.setattr(gpus, "mem_get_info", lambda device: (24, 96), raising=False)
    assert untaken_fraction(torch.device("cuda:1")) == 0.25
    assert untaken_fraction(CPU) == 0


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


def test_memory_that_cannot_be_pinned_leaves_no_error(monkeypatch):
    """CUDA keeps the error of the call, and torch raises it after its next launch, whatever that computes."""
    errors = []

    def register(address, size, flags):
        errors.append("out of memory")
        return 2

    def full(*_, device):
        assert device == GPU
        raise RuntimeError(errors.pop())

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "full", full)
    assert not pin_host_memory(torch.zeros(8, dtype=torch.uint8), GPU)
    assert errors == []


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA A100-SXM4-80GB"])
def test_instances_of_one_card_are_one_card(monkeypatch, name):
    """NCCL refuses them: a rank each on two of them exchange through memory of the host."""
    gpus = pretend(monkeypatch, FakeGpus(["MIG-a", "MIG-b"]))
    properties = gpus.get_device_properties

    def on_bus(device):
        found = properties(device)
        return SimpleNamespace(name=name, pci_domain_id=0, pci_bus_id=7, pci_device_id=0, **vars(found))

    monkeypatch.setattr(gpus, "get_device_properties", on_bus)
    cards = {card_id("cuda:0"), card_id("cuda:1")}
    assert len(cards) == (1 if "MIG" in name else 2)


def test_a_build_without_nccl(monkeypatch):
    """As for Windows: torch has a GPU, and names a backend that it lacks."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    for is_built, backend in ((True, "gloo"), (False, "nccl")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda is_built=is_built: is_built)
        assert default_backend("cuda") == backend
    assert default_backend("cpu") == "gloo"
