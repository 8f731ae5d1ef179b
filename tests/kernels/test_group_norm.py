"""The kernel of a norm with given moments: its eager twin's values, and plain group norm's over several bands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.shard.kernels.group_moments import launch_group_moments, launch_merge_parts, merge_parts_eager
from patchpar.shard.kernels.group_norm import group_norm_eager, launch_group_norm
from patchpar.shard.kernels.map_layout import is_channels_last
from tests.tensors import relative

GROUPS, EPS = 4, 1e-5
SHAPES = {
    "rows": (2, 16, 5, 7),
    "more channels than a program": (1, 260, 3, 5),
    "more pixels than a program": (1, 4, 70, 61),
    "tokens": (2, 12, 48),
    "video": (1, 16, 3, 5, 7),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the last bit


def band(shape: str, dtype: torch.dtype = torch.float32, *, channels_last: bool = False, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    x = (torch.randn(SHAPES[shape]) * 2 + 3).to(dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


def given(x: Tensor, ranks: int, *, seed: int = 0) -> Tensor:
    """Moments of as many ranks, in different numbers of values."""
    torch.manual_seed(seed)
    count = torch.randint(20, 200, (ranks, 1)).float()
    mean, var = torch.randn(ranks, x.shape[0] * GROUPS) + 3, torch.rand(ranks, x.shape[0] * GROUPS) + 0.5
    return torch.cat([count, mean, var * count], 1)


def packed(count: float, mean: float, var: Tensor) -> Tensor:
    return torch.cat([torch.tensor([float(count)]), torch.full_like(var, mean), var * count])


def terms(x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(x.shape[1]).to(x.dtype), torch.randn(x.shape[1]).to(x.dtype)


def same(found: tuple[Tensor, Tensor], twin: tuple[Tensor, Tensor]) -> bool:
    close = CLOSE[twin[0].dtype]
    return torch.allclose(found[0], twin[0], rtol=close, atol=close) and torch.allclose(found[1], twin[1], atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_kernel_equals_its_twin(interpreted: Callable[..., Any], shape: str, channels_last: bool) -> None:
    x = band(shape, channels_last=channels_last)
    args = (x, given(x, 3), GROUPS, EPS, *terms(x))
    found, twin = interpreted(launch_group_norm, *args), group_norm_eager(*args)
    assert same(found, twin)
    assert found[0].stride() == twin[0].stride() == x.stride()
    assert not same(found, group_norm_eager(x, given(x, 2), GROUPS, EPS, *terms(x)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_normalised_in_fp32(interpreted: Callable[..., Any], dtype: torch.dtype) -> None:
    x = band("rows", dtype)
    args = (x, given(x, 4), GROUPS, EPS, *terms(x))
    found = interpreted(launch_group_norm, *args)
    assert found[0].dtype == dtype
    assert same(found, group_norm_eager(*args))


def test_without_weights(interpreted: Callable[..., Any]) -> None:
    x = band("rows")
    assert same(
        interpreted(launch_group_norm, x, given(x, 2), GROUPS, EPS), group_norm_eager(x, given(x, 2), GROUPS, EPS)
    )


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("least", [0.0, 0.3])
def test_stale_moments_are_corrected(interpreted: Callable[..., Any], least: float, published: bool) -> None:
    x = band("rows")
    own_var = 3 - torch.linspace(-0.5, 0.6, x.shape[0] * GROUPS)  # so the corrected one is -0.5 to 0.6
    stale = torch.stack([packed(20, 3, own_var), packed(1e6, 3, torch.full_like(own_var, 2))])
    now = packed(20, 3.1, torch.ones_like(own_var))
    args = (x, stale, GROUPS, EPS, *terms(x))
    twin = group_norm_eager(*args, now, least, published)
    assert same(interpreted(launch_group_norm, *args, now, least, published), twin)
    for other in ((None, least, published), (now, 0.3 - least, published), (now, least, not published)):
        assert not same(twin, group_norm_eager(*args, *other))


def test_moments_are_read_where_a_message_brought_them(interpreted: Callable[..., Any]) -> None:
    """Rows of different ranks at any distance from each other, between values that are no moments."""
    x = band("rows")
    rows = given(x, 3)
    size, starts = rows.shape[1], (5, 40, 91)
    buffer = torch.full((200,), 1e4)
    for start, row in zip(starts, rows, strict=True):
        buffer[start : start + size] = row
    args = (x, buffer, GROUPS, EPS, *terms(x), None, 0.0, False)
    wanted = interpreted(launch_group_norm, x, rows, GROUPS, EPS, *terms(x))
    found = (*interpreted(launch_group_norm, *args, starts), *group_norm_eager(*args, starts))
    want = (*wanted, *group_norm_eager(x, rows, GROUPS, EPS, *terms(x)))
    assert [torch.equal(*each) for each in zip(found, want, strict=True)] == [True] * 4
    assert not same(interpreted(launch_group_norm, *args, (5, 40, 92)), wanted), "control: one element on"


def test_parts_of_a_group_are_merged(interpreted: Callable[..., Any]) -> None:
    x = band("more pixels than a program")
    parts = given(x, 5)
    torch.testing.assert_close(interpreted(launch_merge_parts, parts), merge_parts_eager(parts))


@pytest.mark.parametrize("channels_last", [False, True])
def test_kernels_together_are_the_norm_of_the_whole(interpreted: Callable[..., Any], channels_last: bool) -> None:
    x = band("rows", torch.float16, channels_last=channels_last)
    weight, bias = terms(x)
    bands = [each.clone(memory_format=torch.preserve_format) for each in x.split([2, 3], -2)]
    moments = torch.stack([interpreted(launch_group_moments, each, GROUPS, 1) for each in bands])
    found = [interpreted(launch_group_norm, each, moments, GROUPS, EPS, weight, bias)[0] for each in bands]
    assert all(is_channels_last(each) is channels_last for each in found)
    whole = F.group_norm(x.double(), GROUPS, weight.double(), bias.double(), EPS)
    plain = F.group_norm(x.float(), GROUPS, weight.float(), bias.float(), EPS).half()
    assert relative(torch.cat(found, -2), whole) <= 1.01 * relative(plain, whole)
    alone = [
        interpreted(launch_group_norm, e, moments[i : i + 1], GROUPS, EPS, weight, bias)[0] for i, e in enumerate(bands)
    ]
    assert relative(torch.cat(alone, -2), whole) > 1e-2, "each band with its own moments only"
