"""The kernel that puts a band between its neighbours' rows: its eager twin's values, to the bit where it copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.shard.kernels import concat_halo
from patchpar.shard.kernels.concat_halo import concat_halo_eager, launch_concat_halo
from patchpar.shard.kernels.map_layout import is_channels_last
from tests.breadth import first_of

SHAPES = {"map": (2, 6, 4, 5), "wide": (1, 3, 9, 300), "video": (2, 4, 3, 4, 5)}
ROWS = {"both": (True, True, 1, 1), "first band": (False, True, 1, 2), "last band": (True, False, 2, 1)}
ROWS |= {"one side": (True, False, 1, 0), "zeros": (False, False, 1, 1)}
CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # two roundings


def arranged(shape: str, dim: int, rows: str, *, channels_last: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x = torch.randn(SHAPES[shape]).to(dtype)
    has_before, has_after, before, after = ROWS[rows]

    def beyond(count: int) -> Tensor:
        size = list(x.shape)
        size[dim] = count
        return torch.randn(size).to(dtype)

    halo = (beyond(before) if has_before else None, beyond(after) if has_after else None)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x
    return x, *halo, before, after, dim


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("channels_last", first_of([False, True], True))
def test_a_copy_equals_its_twin(interpreted: Callable[..., Any], rows: str, dim: int, channels_last: bool) -> None:
    for shape in SHAPES:
        args = arranged(shape, dim, rows, channels_last=channels_last, dtype=torch.float16)
        (found, *_), (twin, *_) = interpreted(launch_concat_halo, *args), concat_halo_eager(*args)
        assert torch.equal(found, twin)
        assert found.stride() == twin.stride()
        assert is_channels_last(found) is channels_last


@pytest.mark.parametrize("dtype", first_of([torch.float32, torch.float16, torch.bfloat16], torch.float16))
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_raw_rows_are_normalised_and_activated(
    interpreted: Callable[..., Any], dtype: torch.dtype, channels_last: bool, silu: bool
) -> None:
    for shape in SHAPES:
        for dim in (-2, -1):
            args = arranged(shape, dim, "both", channels_last=channels_last, dtype=dtype)
            terms = torch.randn(3, args[0].shape[0] * args[0].shape[1])
            (found, *_), (twin, *_) = (
                interpreted(launch_concat_halo, *args, terms, silu),
                concat_halo_eager(*args, terms, silu),
            )
            torch.testing.assert_close(found, twin, rtol=CLOSE[dtype], atol=CLOSE[dtype])
            assert torch.equal(found.narrow(dim, 1, args[0].shape[dim]), args[0]), "the band itself is copied"
            assert not torch.allclose(found, concat_halo_eager(*args, terms, not silu)[0], atol=1e-2)


@pytest.mark.parametrize(
    "edges", [(2, 1), (0, 2), *(pytest.param(each, marks=pytest.mark.breadth) for each in [(1, 1), (3, 0)])]
)
@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("channels_last", [False, True])
def test_edges_are_copied_to_be_sent(
    interpreted: Callable[..., Any], edges: tuple[int, int], dim: int, channels_last: bool
) -> None:
    for shape in SHAPES:
        args = arranged(shape, dim, "first band", channels_last=channels_last, dtype=torch.float16)
        found = interpreted(launch_concat_halo, *args, None, False, *edges)
        for copy, twin in zip(found, concat_halo_eager(*args, None, False, *edges), strict=True):
            assert torch.equal(copy, twin)
        x = args[0]
        assert torch.equal(found[1], x.narrow(dim, 0, edges[0]))
        assert torch.equal(found[2], x.narrow(dim, x.shape[dim] - edges[1], edges[1]))
        assert all(copy.is_contiguous() for copy in found[1:])


def ready_rows_of_a_gpu(*args: Any, silu: bool) -> Any:
    """What `ready_rows` returns where tensors are on a GPU. For a process that only interprets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concat_halo, "is_fused", lambda x: True)
        patch.setattr(concat_halo, "concat_halo", launch_concat_halo)
        return concat_halo.ready_rows(*args, silu=silu)


@pytest.mark.parametrize("rows", ["both", "first band", "last band", "zeros"])
@pytest.mark.parametrize("dim", [-2, -1])
def test_rows_alone_are_made_ready_by_one_launch(
    interpreted: Callable[..., Any], launches: Callable[..., Any], rows: str, dim: int
) -> None:
    for silu in (False, True):
        x, before, after, *_ = arranged("map", dim, rows, channels_last=False, dtype=torch.float16)
        args = (before, after, dim, torch.randn(3, x.shape[0] * x.shape[1]))
        ready = partial(ready_rows_of_a_gpu, silu=silu)
        for found, twin in zip(interpreted(ready, *args), concat_halo.ready_rows(*args, silu=silu), strict=True):
            assert (found is None) == (twin is None)
            if found is not None:
                torch.testing.assert_close(found, twin, rtol=2e-3, atol=2e-3)
        assert len(launches(ready, *args)) == (rows != "zeros")


def test_a_convolution_of_it_is_that_of_the_whole(interpreted: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    whole, weight = torch.randn(1, 4, 12, 6), torch.randn(4, 4, 3, 3)
    edges = [0, 5, 12]
    found = []
    for start, end in pairwise(edges):
        before = whole[:, :, start - 1 : start].contiguous() if start else None
        after = whole[:, :, end : end + 1].contiguous() if end < 12 else None
        padded = interpreted(launch_concat_halo, whole[:, :, start:end].contiguous(), before, after, 1, 1, -2)[0]
        found.append(F.conv2d(padded, weight, padding=(0, 1)))
    torch.testing.assert_close(torch.cat(found, -2), F.conv2d(whole, weight, padding=1))


@pytest.mark.parametrize("channels_last", [False, True])
def test_no_product_in_the_kernel_exceeds_32_bits(launches: Callable[..., Any], channels_last: bool) -> None:
    """Of maps of more than 2^31 values, as of a VAE; what Triton is given at that size has 64 bits."""
    x = torch.empty(1, 128, 2060, 8192, dtype=torch.float16, device="meta")
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    (launch,) = launches(launch_concat_halo, x, None, None, 1, 1, -2)
    run = x.numel() // (1 if channels_last else 128)
    row = run // 2060
    found = {name: launch.arguments[name] for name in ("first", "size", "last", "length")}
    assert found == {"first": row, "size": run, "last": row, "length": run + 2 * row}
    assert (run > 2**31) is channels_last
