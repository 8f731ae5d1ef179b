"""Copies to and from a GPU go through pinned memory and do not wait; on a CPU nothing is copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar.shard import host_memory
from patchpar.shard.host_memory import HostCopy, to_device, to_host

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class FakeTensor:
    """A tensor that only says where it is and what was asked of it."""

    def __init__(self, device: torch.device, log: list[Any]) -> None:
        self.device, self.log = device, log
        self.shape, self.dtype = (2,), torch.float32

    def pin_memory(self) -> FakeTensor:
        self.log.append("pin")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> FakeTensor:
        self.log.append((str(device), non_blocking))
        return FakeTensor(device, self.log)

    def cpu(self) -> FakeTensor:
        return self.to(CPU)

    def copy_(self, other: FakeTensor, non_blocking: bool = False) -> None:
        self.log.append((f"{other.device} into pinned", non_blocking))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of tensors and events."""
    log: list[Any] = []
    event = SimpleNamespace(synchronize=lambda: log.append("wait"))

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(record_event=lambda: [event, log.append(f"record on {device}")][0])

    modules = {"cuda": SimpleNamespace(mem_get_info=None, current_stream=current_stream), "mps": SimpleNamespace()}
    monkeypatch.setattr(host_memory, "device_module", modules.__getitem__)

    def empty(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> FakeTensor:
        assert pin_memory
        return FakeTensor(CPU, log)

    monkeypatch.setattr(torch, "empty", empty)
    return log


@pytest.mark.parametrize(
    ("source", "target", "asked"),
    [
        (CPU, GPU, ["pin", ("cuda:1", True)]),
        (CPU, CPU, [("cpu", False)]),
        (GPU, GPU, [("cuda:1", False)]),
        (GPU, CPU, [("cpu", False)]),
        (CPU, torch.device("mps"), [("mps", False)]),
    ],
    ids=str,
)
def test_a_gpu_reads_pinned_memory(
    log: list[Any], source: torch.device, target: torch.device, asked: list[Any]
) -> None:
    to_device(FakeTensor(source, log), target)  # type: ignore[arg-type]
    assert log == asked


def test_a_copy_of_a_gpu_is_awaited_only_when_it_is_read(log: list[Any]) -> None:
    copy = HostCopy(FakeTensor(GPU, log))  # type: ignore[arg-type]
    assert log == [("cuda:1 into pinned", True), "record on cuda:1"], "whatever device is the current one"
    assert copy.wait().device == CPU
    assert log[2:] == ["wait"]


def test_a_device_without_pinned_memory(log: list[Any]) -> None:
    assert to_host(FakeTensor(torch.device("mps"), log)).device == CPU  # type: ignore[arg-type]
    assert log == [("cpu", False)]


def test_a_tensor_of_the_cpu_is_not_copied() -> None:
    x = torch.randn(3)
    assert to_host(x) is x
    assert to_device(x, CPU) is x
