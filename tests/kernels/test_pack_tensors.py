"""What a rank sends in one exchange, packed: strided edges of a map beside small tensors, to several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from patchpar.comm.exchange_part import edges_part
from patchpar.comm.kernels.pack_tensors import MOST_TENSORS, launch_write_pieces, pack_tensors, write_pieces_eager
from patchpar.comm.layouts import edge_layout
from patchpar.comm.transport import TensorSpec
from patchpar.comm.transport.packing import pack, pack_row
from patchpar.plan.mesh import Mesh
from tests.breadth import first_of
from tests.kernels.test_fused_ops import Calls, on_gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
UNWRITTEN = 113


def band(*shape: int, dtype: torch.dtype, channels_last: bool) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.contiguous(memory_format=FORMATS[len(shape)]) if channels_last else x


def written(write: Callable[..., None], tensors: Sequence[Tensor], pieces: Sequence[int], size: int) -> list[int]:
    """The bytes of a buffer of the first tensor's dtype, where all were UNWRITTEN."""
    dtype = tensors[0].dtype
    buffer = torch.full((size * dtype.itemsize,), UNWRITTEN, dtype=torch.uint8).view(dtype)
    write(buffer, tensors, pieces)
    return list(buffer.view(torch.uint8))


def one_by_one(buffer: Tensor, tensors: Sequence[Tensor], pieces: Sequence[int]) -> None:
    for number, start in zip(pieces[::2], pieces[1::2], strict=True):
        x = tensors[number]
        size = x.numel() * x.element_size() // buffer.element_size()
        buffer.narrow(0, start, size).view(x.dtype).view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", first_of(DTYPES, DTYPES[0]))
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dim", first_of([-2, -1], -2))
def test_edges_and_what_all_ranks_get_are_written_and_nothing_else(
    interpreted: Callable[..., Any], dtype: torch.dtype, channels_last: bool, dim: int
) -> None:
    for shape in ((2, 20, 6, 33), (1, 4, 3, 5, 6)):
        x = band(*shape, dtype=dtype, channels_last=channels_last)
        rows = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 2, 2)
        moments, scalar = torch.randn(5), torch.tensor(7, dtype=torch.int64)
        tensors = [*rows, moments, scalar]
        wide = [moments.nbytes, scalar.nbytes]
        pieces, end = list[int](), 0
        for number in (2, 3, 0, 2, 3, 1):  # to two ranks, and what begins in the buffer begins there for its own dtype
            start = -(-end // 16) * 16
            pieces += (number, start // dtype.itemsize)
            end = start + (tensors[number].nbytes if number < 2 else wide[number - 2])
        args = (tensors, pieces, -(-end // 32) * 32 // dtype.itemsize)
        found, wanted = interpreted(written, launch_write_pieces, *args), written(one_by_one, *args)
        assert found == wanted
        twin = written(write_pieces_eager, *args)
        assert all(got == want for got, want in zip(twin, wanted, strict=True) if want != UNWRITTEN)
        other = [x.narrow(dim, 1, 1), *tensors[1:]]
        assert interpreted(written, launch_write_pieces, other, *args[1:]) != wanted, "control: another row"


def test_empty_tensors_and_those_of_no_dims_take_their_place(interpreted: Callable[..., Any]) -> None:
    tensors = [torch.randn(3, 4)[:, :0], torch.tensor(2.0), torch.randn(4, 3).t()]
    args = (tensors, (0, 0, 1, 0, 2, 1), 13)
    assert interpreted(written, launch_write_pieces, *args) == written(one_by_one, *args)
    assert written(write_pieces_eager, *args) == written(one_by_one, *args)


def operators(write: Callable[..., Any], *args: Any) -> list[str]:
    """The operators that are neither views nor empty allocations: each a launch on a GPU."""
    with Calls() as calls:
        write(*args)
    views = ("view", "_unsafe_view", "detach", "slice", "narrow", "as_strided", "select", "empty", "new_empty")
    return [name for name in calls.names if name.split(".")[0] != "prim" and name.split(".")[1] not in views]


def test_a_message_is_one_launch_on_a_gpu() -> None:
    """The kernel where something has strides; else torch's own, whatever the number of tensors."""
    with FakeTensorMode() as mode:
        strided, flat = (on_gpu(mode, x) for x in (torch.randn(4, 3).t(), torch.randn(7)))
        assert not strided.is_contiguous()
        many = [on_gpu(mode, torch.randn(3, 4)) for _ in range(2 * MOST_TENSORS)]
        assert operators(pack, [strided, strided.clone(), flat]) == ["patchpar.write_pieces.default"]
        assert operators(pack, many) == ["aten.cat.out"]
        messages = [[flat, strided], [], [flat], [flat, strided]]
        assert operators(pack_row, messages, flat.device) == ["patchpar.write_pieces.default"]
        buffer = flat.new_empty(24)
        assert operators(pack_tensors, buffer.double(), [strided.double()] * 2, (0, 0, 1, 12))[-1] == "aten.cat.out"


def test_a_round_of_edges_and_moments_is_one_launch_on_a_gpu() -> None:
    axis = Mesh(1, range(4), patch=4)["patch"]
    with FakeTensorMode() as mode:
        x, moments = (on_gpu(mode, x) for x in (torch.randn(2, 8, 6, 5).half(), torch.randn(9)))
        first, last = x.narrow(-2, 0, 1), x.narrow(-2, 4, 2)
        above, below = TensorSpec((2, 8, 2, 5), x.dtype), TensorSpec((2, 8, 1, 5), x.dtype)
        for shared in ([moments], []):
            edges = edges_part(axis, first, last, above, below)
            layout, tensors = edge_layout(axis, shared, edges)
            assert operators(layout.buffers, tensors, x.device) == ["patchpar.write_pieces.default"]


def test_no_message_has_more_blocks_than_a_grid(launches: Callable[..., Any]) -> None:
    """CUDA has 65,535 programs in all dims but the first, in which a message of any size has its blocks."""
    x = torch.empty(2**27, 2, dtype=torch.float16, device="meta").t()
    (launch,) = launches(launch_write_pieces, x.new_empty(x.numel()), [x], (0, 0))
    assert launch.grid == (2**18, 1)
