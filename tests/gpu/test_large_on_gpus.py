"""Kernels and pinned memory of one GPU at sizes, and in states, that only a GPU can have."""

from __future__ import annotations

import pytest
import torch

from patchpar.comm.kernels.pack_tensors import BLOCK, pack_tensors
from patchpar.comm.kernels.triton_check import why_no_kernels
from patchpar.launch.accelerators import pin_host_memory, unpin_host_memory
from patchpar.shard.kernels.concat_halo import concat_halo
from patchpar.shard.weights.host_segment import HostSegment

pytestmark = pytest.mark.gpu


def test_kernels_run_here(kind: str) -> None:
    if kind == "cpu":
        pytest.skip("a CPU has none")
    for index in range(torch.cuda.device_count()):
        assert why_no_kernels(index) == ""


def test_memory_that_cannot_be_pinned_leaves_no_error(kind: str) -> None:
    """What is pinned already cannot be pinned again; CUDA keeps that error for whoever asks next."""
    if kind == "cpu":
        pytest.skip("memory is pinned for GPUs")
    device, segment = torch.device(kind, 0), HostSegment(2**20)
    assert pin_host_memory(segment.memory, device)
    try:
        assert not pin_host_memory(segment.memory, device)
        assert (torch.ones(4, device=device) + 1).tolist() == [2.0] * 4
    finally:
        torch.cuda.synchronize()
        unpin_host_memory(segment.memory.data_ptr())


def test_messages_of_more_blocks_than_a_grid_is_high(kind: str) -> None:
    """CUDA has 65,535 programs in all dims but the first."""
    if kind == "cpu" or torch.cuda.mem_get_info()[0] < 2**31:
        pytest.skip("needs 2 GiB of a GPU")
    x = (
        torch.arange(2 * 70_000 * BLOCK, device=kind, dtype=torch.int32)
        .remainder(1000)
        .view(-1, 2)
        .to(torch.float16)
        .t()
    )
    buffer = x.new_empty(x.numel())
    with torch.no_grad():
        pack_tensors(buffer, [x], (0, 0))
    assert torch.equal(buffer, x.reshape(-1))


@pytest.mark.parametrize("channels_last", [False, True])
def test_maps_of_more_than_2_to_the_31_values(kind: str, channels_last: bool) -> None:
    """A band of a VAE at 8192 x 8192: products of 32 bits would overflow."""
    if kind == "cpu" or torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of a GPU")
    x = torch.empty(1, 128, 2060, 8192, dtype=torch.float16, device=kind)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    rows = torch.arange(x.shape[2], device=kind).remainder(1000).to(x.dtype)
    x.copy_(rows.view(1, 1, -1, 1).expand_as(x))
    with torch.no_grad():
        y, _, last = concat_halo(x, None, (x[:, :, :1] + 5).contiguous(), 1, 1, -2, None, False, 0, 1)
        assert torch.equal(y[:, :, 1:-1], x)
        assert y[:, :, 0].eq(0).all()
        assert y[:, :, -1].eq(5).all()
        assert last.eq(rows[-1]).all()
