"""A root mean square norm of torch is one kernel on tapes for GPUs, where torch has that kernel."""

from __future__ import annotations

from collections import Counter

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.models.dry_run import rms_norm
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import MetaMode
from patchpar.plan.replay.price import RMS_NORM as KERNEL
from patchpar.plan.replay.tape import Operator
from patchpar.shard.sdpa import SdpaMode
from tests.planner.test_record import operators, recorded
from tests.versions import needs_torch

WIDTH = 64
has_kernel = needs_torch("2.9", "kernel for it")


def kernels(norm: nn.Module, x: Tensor) -> list[Operator]:
    """Those of a call on a GPU; its result has the form of a real one."""
    want = norm(torch.zeros_like(x, device="cpu"))
    noted: list[Operator] = []
    mode = MetaMode(LiveBytes(""), noted.append)
    with torch.no_grad(), SdpaMode(mode.attend, mode.on_gpus), mode:
        found = norm.to("meta")(x)
    assert (found.shape, found.dtype, found.stride()) == (want.shape, want.dtype, want.stride())
    return noted


@has_kernel
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_reads_its_input_and_writes_its_output_once(affine: bool) -> None:
    """And one value in fp32 for each row."""
    norm = nn.RMSNorm(WIDTH, elementwise_affine=affine, dtype=torch.bfloat16)
    x = torch.empty(2, 8, WIDTH, dtype=torch.bfloat16, device="meta")
    moved = 2 * (2 * x.numel() + affine * WIDTH) + 4 * 2 * 8
    assert kernels(norm, x) == [Operator(KERNEL, "bfloat16", 0, moved, (2 * 8, WIDTH))]


@has_kernel
def test_torchs_function_of_another_name_is_the_same() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.rms_norm(x, (WIDTH,))

    assert [each.name for each in kernels(Norm(), torch.empty(8, WIDTH, device="meta"))] == [KERNEL]


@has_kernel
def test_an_input_with_gaps_is_copied_first() -> None:
    x = torch.empty(8, 2 * WIDTH, device="meta")[:, :WIDTH]
    assert [each.name for each in kernels(nn.RMSNorm(WIDTH), x)] == ["clone", KERNEL]


@pytest.mark.parametrize(
    ("norm", "shape", "layout"),
    [
        (nn.RMSNorm(WIDTH), (8, WIDTH), torch.contiguous_format),
        (nn.RMSNorm(WIDTH, dtype=torch.half), (1, 4, 8, WIDTH), torch.channels_last),
        (diffusers.models.normalization.RMSNorm(WIDTH, 1e-6).half(), (8, WIDTH), torch.contiguous_format),
    ],
    ids=["weight in another dtype", "channels_last", "written out"],
)
def test_other_norms_are_the_kernels_they_consist_of(
    norm: nn.Module, shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    x = torch.empty(shape, dtype=torch.half, device="meta", memory_format=layout)
    names = [each.name for each in kernels(norm, x)]
    assert KERNEL not in names
    assert len(names) >= 7


def test_so_are_those_of_torch_that_has_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "HAS_KERNEL", False)
    assert len(kernels(nn.RMSNorm(WIDTH), torch.empty(8, WIDTH, device="meta"))) >= 6


@has_kernel
def test_tapes_for_gpus_have_one_kernel_for_each_norm() -> None:
    """FLUX has two in each single block, and four in each that has text apart. A worker on a CPU launches them all."""
    apart, joined = (operators(recorded("flux", "single", steps=1, joined=joined)[0]) for joined in (False, True))
    assert joined[KERNEL] > 0 == apart[KERNEL]
    assert apart["rsqrt"] - joined["rsqrt"] == joined[KERNEL]
    assert apart - joined == Counter(dict.fromkeys(apart - joined, joined[KERNEL])) + Counter(mul=joined[KERNEL])


def test_a_norm_with_values_is_computed() -> None:
    x = torch.randn(8, WIDTH)
    mode = MetaMode(LiveBytes(""))
    with torch.no_grad(), SdpaMode(mode.attend, mode.on_gpus), mode:
        found = F.rms_norm(x, (WIDTH,))
    torch.testing.assert_close(found, F.rms_norm(x, (WIDTH,)))
