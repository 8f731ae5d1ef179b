"""Fused kernels are left out, with the reason, where Triton is installed and cannot run one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from patchpar.comm.kernels import triton_check
from patchpar.comm.kernels.program import Program
from patchpar.comm.kernels.triton_check import BLOCK, runs_kernels, why_no_kernels


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two GPUs that are not there; the devices that were made the current one. Their memory is that of the CPU."""
    found: list[str] = []
    empty = torch.empty

    def on(device: str) -> AbstractContextManager[None]:
        found.append(device)
        return nullcontext()

    monkeypatch.setattr(triton_check, "has_triton", lambda: True)
    monkeypatch.setattr(triton_check, "device_count", lambda kind: 2)
    monkeypatch.setattr(triton_check, "cuda_capability", lambda device: (7, 5))
    monkeypatch.setattr(triton_check, "current_device", on)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: empty(*shape))
    for known in (runs_kernels, triton_check._runs):
        known.cache_clear()
    yield found
    for known in (runs_kernels, triton_check._runs):
        known.cache_clear()


def test_a_kernel_is_tried_once_on_each_gpu(current: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(Program, "launch", lambda self, grid, tensors, **constants: launched.append((grid, constants)))
    assert [runs_kernels(index, torch.float16) for index in (0, 1, 0)] == [True] * 3
    assert not runs_kernels(0, torch.float64), "kernels add in fp32"
    assert not runs_kernels(0, torch.bfloat16), "a T4 has no bf16"
    assert launched == [((1,), {"BLOCK": BLOCK})] * 2
    assert current == ["cuda:0", "cuda:1"], "a rank's GPU need not be the first"
    assert runs_kernels(2, torch.bfloat16), "a GPU that torch does not have is one of which launches are counted"
    assert len(launched) == 2


def test_what_triton_says_is_the_reason(
    current: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container without a compiler, which images with torch often are."""

    def launch(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\n Please specify via CC environment variable")

    monkeypatch.setattr(Program, "launch", launch)
    assert not runs_kernels(0, torch.float16)
    assert not runs_kernels(0, torch.float32)
    (record,) = caplog.records
    assert "operators of torch take the place of fused kernels on GPU 0" in record.message
    assert "a C compiler, Python's headers, and" in record.message
    assert "Failed to find C compiler. Please specify" in record.message


def test_old_gpus_are_not_tried(current: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_check, "cuda_capability", lambda device: (6, 1))
    assert "capability 7.0 and newer" in why_no_kernels(0)
    assert current == []


@pytest.mark.parametrize(("version", "runs"), [((3, 2), False), ((3, 3), True), (None, True)], ids=str)
def test_triton_has_to_know_tuples(
    current: list[str], monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None, runs: bool
) -> None:
    """Programs have tuples among their arguments. None: a build under another name, which is tried."""
    monkeypatch.setattr(Program, "launch", lambda *_, **__: None)
    monkeypatch.setattr(triton_check, "triton_version", lambda: version)
    assert runs_kernels(0, torch.float16) == runs
    assert ("Triton 3.2 is installed" in why_no_kernels(0)) != runs


def test_the_program_writes_ones(interpreted: Callable[..., Any]) -> None:
    assert interpreted(_tried).tolist() == [1.0] * BLOCK


def _tried() -> torch.Tensor:
    x = torch.zeros(BLOCK)
    triton_check._WRITE_ONES.launch((1,), (x,), BLOCK=BLOCK)
    return x
