"""The kernel of a band's moments: its eager twin's values, one launch, and it compiles for GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.shard.kernels.group_moments import (
    VALUES_PER_PART,
    group_moments,
    group_moments_eager,
    launch_group_moments,
    parts_of_group,
)
from tests.breadth import first_of

GROUPS = 4
SHAPES = {
    "rows": (2, 16, 5, 7),
    "several tiles": (1, 8, 37, 61),
    "three channels in a group": (2, 12, 9, 11),
    "tokens": (2, 16, 48),
    "video": (1, 16, 3, 5, 7),
    "one value": (1, 4, 1, 1),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def band(shape: str, dtype: torch.dtype, *, channels_last: bool, mean: float = 30.0) -> Tensor:
    torch.manual_seed(0)
    x = (torch.randn(SHAPES[shape]) * 2 + mean).to(dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels_last", first_of([False, True], True))
@pytest.mark.parametrize("parts", first_of([1, 3], 3))
def test_the_kernel_equals_its_twin(
    interpreted: Callable[..., Any], shape: str, channels_last: bool, parts: int
) -> None:
    x = band(shape, torch.float16, channels_last=channels_last)
    found, twin = interpreted(launch_group_moments, x, GROUPS, parts), group_moments_eager(x, GROUPS, parts)
    torch.testing.assert_close(found, twin, rtol=2e-5, atol=1e-5)
    assert not torch.allclose(found, group_moments_eager(x + 0.1, GROUPS, parts), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, -300.0])
def test_every_dtype_is_summed_in_fp32(interpreted: Callable[..., Any], dtype: torch.dtype, mean: float) -> None:
    x = band("several tiles", dtype, channels_last=False, mean=mean)
    found = interpreted(launch_group_moments, x, GROUPS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), group_moments_eager(x.double(), GROUPS), rtol=1e-4, atol=1e-4)


def test_half_precision_is_not_copied(launches: Callable[..., Any]) -> None:
    for x in (band("rows", torch.float16, channels_last=last) for last in (False, True)):
        (launch,) = launches(launch_group_moments, x, GROUPS)
        assert launch.arguments["x"] is x
        assert launch.grid == (x.shape[0] * GROUPS, 1)


def test_large_groups_are_divided() -> None:
    assert parts_of_group((2, 320, 32, 128), 32) == 1
    vae = (1, 128, 256, 1024)
    assert parts_of_group(vae, 32) == math.prod(vae) // 32 // VALUES_PER_PART == 8


def test_tensors_on_a_cpu_do_not_go_through_the_operator() -> None:
    x = band("rows", torch.float32, channels_last=False)
    assert torch.equal(group_moments(x, GROUPS), group_moments_eager(x, GROUPS))
