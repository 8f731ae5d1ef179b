"""A fused operator that is called with the same tensors again launches its kernel at once, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from patchpar.comm.kernels import repeated_op
from patchpar.comm.kernels.program import Compiled
from patchpar.comm.kernels.repeated_op import RepeatedOp


class Kernel:
    """A compiled kernel, the operator that has it, and its launch: they note what runs."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.compiled = True

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (3, 1, 1)
        return lambda *values: self.ran.append(f"again, {len(values)} values")

    def launch(self, into: Tensor, x: Tensor | None, number: int) -> Compiled | None:
        self.ran.append("launch")
        return (self, (3, 1, 1), (into, x, number, 16)) if self.compiled else None

    def operator(self, into: Tensor, x: Tensor | None, number: int) -> None:
        self.ran.append("operator")


class Watching(TorchDispatchMode):
    """A mode that sees operators."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(repeated_op, "is_fused", lambda x: x.dtype != torch.float64)
    return Kernel()


def repeated(kernel: Kernel) -> RepeatedOp:
    return RepeatedOp(kernel.operator, kernel.launch)  # type: ignore[arg-type]


@torch.no_grad()
def test_with_the_same_arguments_the_kernel_runs_at_once(kernel: Kernel) -> None:
    op, into, x = repeated(kernel), torch.zeros(4), torch.zeros(4)
    for _ in range(3):
        op(into, x, 7)
    assert kernel.ran == ["launch", "again, 4 values", "again, 4 values"]


@torch.no_grad()
@pytest.mark.parametrize("other", ["into", "x", "none", "number"])
def test_another_argument_is_asked_again(kernel: Kernel, other: str) -> None:
    """Also one that is equal: what a kernel is compiled for is not known of it."""
    op, into, x = repeated(kernel), torch.zeros(4), torch.zeros(4)
    changed: dict[str, tuple[Any, ...]] = {
        "into": (into.clone(), x, 7),
        "x": (into, x.clone(), 7),
        "none": (into, None, 7),
        "number": (into, x, 8),
    }
    op(into, x, 7)
    op(*changed[other])
    assert kernel.ran == ["launch", "launch"]
    op(*changed[other])
    assert kernel.ran[2:] == ["again, 4 values"]


def test_what_watches_or_records_operators_sees_the_operator(kernel: Kernel) -> None:
    op, into, x = repeated(kernel), torch.zeros(4), torch.zeros(4)
    with torch.no_grad():
        op(into, x, 7)
    op(into, x, 7)
    with torch.no_grad(), Watching():
        op(into, x, 7)
    assert kernel.ran == ["launch", "operator", "operator"]
    with torch.no_grad():
        op(into, x, 7)
    assert kernel.ran[3:] == ["again, 4 values"], "control"


@torch.no_grad()
@pytest.mark.parametrize("wide", [True, False])
def test_without_a_compiled_kernel_nothing_is_launched_again(kernel: Kernel, wide: bool) -> None:
    """Elsewhere than on GPUs, and where Triton has not returned what it compiled."""
    op, x = repeated(kernel), torch.zeros(4, dtype=torch.float64 if wide else torch.float32)
    kernel.compiled = False
    for _ in range(2):
        op(x, x, 7)
    assert kernel.ran == ["operator" if wide else "launch"] * 2
