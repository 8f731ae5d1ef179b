"""A convolution over uneven patches with their halo is the convolution of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.comm.exchange_part import Halo
from patchpar.shard.unet.layers import (
    ConvolutionArguments,
    convolve_with_halo,
    is_heavy,
    is_thin,
    mend_borders,
    stencil_of,
)
from patchpar.shard.unet.one_column import convolve_strided
from tests.tensors import relative
from tests.unit.parts import with_halo

SHAPES = {
    "3": {"kernel_size": 3, "padding": 1},
    "3, stride 2": {"kernel_size": 3, "padding": 1, "stride": 2},
    "3, dilation 2": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "5": {"kernel_size": 5, "padding": 2},
    "5, stride 2": {"kernel_size": 5, "padding": 2, "stride": 2},
    "7, stride 2": {"kernel_size": 7, "padding": 3, "stride": 2},
    "3, groups": {"kernel_size": 3, "padding": 1, "groups": 2},
    "1 x 3": {"kernel_size": (1, 3), "padding": (0, 1)},
    "2, stride 2": {"kernel_size": 2, "padding": 0, "stride": 2},
}
Way = Callable[[nn.Conv2d, Tensor, int, Halo], Tensor]


def mended(conv: nn.Conv2d, x: Tensor, dim: int, halo: Halo) -> Tensor:
    return mend_borders(conv, x, conv(x), dim, stencil_of(conv, dim), halo)


def at_once(conv: nn.Conv2d, x: Tensor, dim: int, halo: Halo) -> Tensor:
    return convolve_with_halo(conv, x, dim, stencil_of(conv, dim), halo)


def plain(conv: nn.Conv2d, x: Tensor, dim: int, halo: Halo) -> Tensor:
    return conv(x)


def over_patches(way: Way, conv: nn.Conv2d, x: Tensor, starts: Sequence[int], dim: int) -> Tensor:
    stencil = stencil_of(conv, dim)
    patches = with_halo(x, starts, dim, stencil.before, stencil.after)
    return torch.cat([way(conv, part, dim, halo) for part, halo in patches], dim)


def case(shape: str, dim: int, rows: int) -> tuple[nn.Conv2d, Tensor]:
    torch.manual_seed(0)
    size = [16, 16]
    size[dim] = rows
    return nn.Conv2d(4, 6, **SHAPES[shape]).requires_grad_(False), torch.randn(2, 4, *size)


@pytest.mark.parametrize("way", [mended, at_once])
@pytest.mark.parametrize("starts", [(0, 20, 40), (0, 14, 40), (0, 14, 28, 44), (0, 20, 41), (0, 16, 30, 47)])
@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("shape", SHAPES)
def test_patches_with_rows_to_themselves(shape: str, dim: int, starts: Sequence[int], way: Way) -> None:
    conv, x = case(shape, dim, starts[-1])
    if conv.kernel_size == conv.stride:  # nothing is read beyond the share
        way = mended
    torch.testing.assert_close(over_patches(way, conv, x, starts, dim), conv(x), atol=1e-5, rtol=1e-5)


def test_weights_are_heavy_where_the_map_is_small() -> None:
    wide, narrow = (nn.Conv2d(width, width, 3, padding=1) for width in (64, 4))
    assert is_heavy(wide, torch.empty(2, 64, 16, 32))
    assert not is_heavy(narrow, torch.empty(2, 4, 16, 32))


@pytest.mark.parametrize("starts", [(0, 4, 8), (0, 2, 6, 12), (0, 4, 9), (0, 4, 12, 19)])
@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] not in "27"])
def test_thin_patches(shape: str, dim: int, starts: Sequence[int]) -> None:
    conv, x = case(shape, dim, starts[-1])
    torch.testing.assert_close(over_patches(at_once, conv, x, starts, dim), conv(x), atol=1e-5, rtol=1e-5)


def test_patches_of_a_single_row() -> None:
    conv, x = case("3", -2, 4)
    assert is_thin(1, stencil_of(conv, -2))
    torch.testing.assert_close(over_patches(at_once, conv, x, range(5), -2), conv(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", ["3", "3, stride 2", "3, dilation 2", "5"])
def test_without_the_halo_only_the_border_rows_are_wrong(shape: str) -> None:
    conv, x = case(shape, -2, 40)
    wrong = (over_patches(plain, conv, x, (0, 20, 40), -2) - conv(x)).abs().amax((0, 1, 3)) > 1e-4
    stencil = stencil_of(conv, -2)
    border = 20 // conv.stride[0]
    rows = set(range(border - stencil.outputs_after(), border + stencil.outputs_before()))
    assert set(wrong.nonzero().flatten().tolist()) == rows
    assert rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_formats(dtype: torch.dtype) -> None:
    conv, x = case("3", -2, 40)
    conv, x = conv.to(dtype), x.to(dtype)
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(over_patches(mended, conv, x, (0, 14, 40), -2), conv(x), atol=limit, rtol=limit)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("way", "starts"), [(mended, (0, 20, 40)), (at_once, (0, 4, 6, 8))])
@pytest.mark.parametrize("shape", ["3, stride 2", "5, stride 2", "7, stride 2"])
def test_columns_with_a_stride_in_bfloat16(shape: str, way: Way, starts: Sequence[int], autocast: bool) -> None:
    """Borders, and thin bands, have one column of results, which oneDNN gets wrong on CPUs with AMX."""
    conv, x = case(shape, -1, starts[-1])
    want = conv(x)
    if not autocast:
        conv, x = conv.to(torch.bfloat16), x.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = over_patches(way, conv, x, starts, -1)
    assert found.dtype == torch.bfloat16
    assert relative(found.float(), want) <= 1e-2


@pytest.mark.parametrize("columns", [2, 3, 4, 8])
def test_a_convolution_with_rows_and_columns_exchanged(columns: int) -> None:
    """Whatever the precision; for videos too."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 3, 9, columns).half(), torch.randn(6, 2, 1, 3, 2).half(), torch.randn(6).half()
    sizes = (1, 1, 2), (0, 1, 0), (1, 2, 1)
    found = convolve_strided(F.conv3d, x, weight, bias, sizes, 2)
    want = F.conv3d(x.float(), weight.float(), bias.float(), *sizes, 2)
    assert found.shape == want.shape
    assert relative(found.float(), want) <= 1e-3


def test_a_convolution_over_frames_and_pixels() -> None:
    torch.manual_seed(0)
    conv = nn.Conv3d(4, 6, (3, 3, 3), padding=1).requires_grad_(False)
    x = torch.randn(1, 4, 3, 20, 8)
    torch.testing.assert_close(over_patches(mended, conv, x, (0, 8, 20), -2), conv(x), atol=1e-5, rtol=1e-5)


def test_padding_by_the_model_itself() -> None:
    """UNets that pad one zero row on at the end and then convolve without padding."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, stride=2).requires_grad_(False)
    x, pad = torch.randn(1, 4, 40, 16), (0, 1, 0, 1)
    stencil, parts = stencil_of(conv, -2), []
    for part, halo in with_halo(x, (0, 14, 40), -2, stencil.before, stencil.after):
        y = conv(nn.functional.pad(part, pad))
        padded_across = nn.functional.pad(part, (0, 1, 0, 0))
        across = Halo(None, None if halo.after is None else nn.functional.pad(halo.after, (0, 1, 0, 0)))
        parts.append(mend_borders(conv, padded_across, y, -2, stencil, across))
    torch.testing.assert_close(torch.cat(parts, -2), conv(nn.functional.pad(x, pad)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", ["same", "valid", 1, (1,), (0, 2)])
@pytest.mark.parametrize("dilation", [1, 2, (2, 1)])
def test_arguments_of_a_call_give_its_output(
    padding: str | int | tuple[int, ...], dilation: int | tuple[int, int]
) -> None:
    """A word for the padding is as many rows as torch pads, which depends on the dilation."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, 4, 12, 10), torch.randn(6, 2, 3, 5), torch.randn(6)
    conv = ConvolutionArguments.of(weight, bias, padding=padding, dilation=dilation, groups=2)
    assert [len(sizes) for sizes in (conv.stride, conv.padding, conv.dilation)] == [2, 2, 2]
    found = nn.functional.conv2d(x, weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    wanted = nn.functional.conv2d(x, weight, bias, 1, padding, dilation, 2)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0)
