"""What torch says of accelerators and their groups, on a machine without any."""

import pytest
import torch
import torch.distributed as dist

from patchpar.errors import LaunchError
from patchpar.launch.accelerators import group_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def group():
    """Make the default group of one rank; destroyed at the end."""

    def make(backend):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "said", "of_gpu"),
    [
        (None, "undefined", "nccl" if dist.is_nccl_available() else "gloo"),
        ("gloo", "gloo", "gloo"),
        ("cpu:gloo,cuda:gloo", "cpu:gloo,cuda:gloo", "gloo"),
    ],
    ids=str,
)
def test_the_backend_of_a_device(group, backend, said, of_gpu):
    group(backend)
    assert dist.get_backend() == said
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
