"""The kernel that merges attention over parts of the keys: its eager twin's values, and one launch for all parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from patchpar.shard.attention.partial import Partial, attend_locally, laid_alike, merge_partials
from patchpar.shard.kernels.merge_partials import launch_merge, merge_eager
from tests.breadth import first_of

from .test_fused_ops import Calls, on_gpu

Parts = tuple[Tensor, Tensor, list[Tensor], list[Tensor]]


def parts(number: int, *, queries: int = 37, width: int = 40, dtype: torch.dtype = torch.float32) -> Parts:
    """Attention of the same queries to so many parts of the keys, as a kernel returns it: tokens before heads."""
    torch.manual_seed(0)
    q = torch.randn(2, queries, 3, width).transpose(1, 2) * 3
    found = []
    for _ in range(number):
        k, v = (torch.randn(2, 11, 3, width).transpose(1, 2) for _ in range(2))
        out, lse = attend_locally(q, k, v)
        found.append((out.transpose(1, 2).contiguous().transpose(1, 2).to(dtype), lse))
    (out, lse), *others = found
    return out, lse, [each for each, _ in others], [each for _, each in others]


@pytest.mark.parametrize("number", first_of(range(1, 9), 1, 2, 8))
def test_the_kernel_equals_its_twin(interpreted: Callable[..., Any], number: int) -> None:
    given = parts(number)
    for found, twin in zip(interpreted(launch_merge, *given), merge_eager(*given), strict=True):
        torch.testing.assert_close(found, twin, rtol=1e-5, atol=1e-6)
        assert found.stride() == twin.stride()
    if number > 1:
        out, lse, outs, lses = given
        fewer = merge_eager(out, lse, outs[1:], lses[1:])[0]
        assert not torch.allclose(fewer, merge_eager(*given)[0], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("queries", "width"), first_of([(1, 8), (130, 64), (3, 160)], (130, 64)))
def test_half_precision_is_merged_in_fp32(
    interpreted: Callable[..., Any], dtype: torch.dtype, queries: int, width: int
) -> None:
    given = parts(3, queries=queries, width=width, dtype=dtype)
    out, lse = interpreted(launch_merge, *given)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact = merge_eager(given[0].double(), given[1].double(), [x.double() for x in given[2]], given[3])
    torch.testing.assert_close(out.double(), exact[0], rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact[1].double(), rtol=1e-5, atol=1e-5)


def test_log_sum_exps_cut_out_of_longer_rows(interpreted: Callable[..., Any]) -> None:
    out, lse, outs, lses = parts(3)
    cut = [torch.nn.functional.pad(x, (0, 27), value=9.0)[..., : x.shape[2]] for x in (lse, *lses)]
    found = interpreted(launch_merge, out, cut[0], outs, cut[1:])
    torch.testing.assert_close(found[0], merge_eager(out, lse, outs, lses)[0], rtol=1e-5, atol=1e-6)


def test_queries_whose_keys_are_masked(interpreted: Callable[..., Any]) -> None:
    """In one part they count nothing, in all parts the output is zero, and nothing becomes NaN."""
    out, lse, outs, lses = parts(2)
    for number, (masked, masked_lse) in enumerate(((out, lse), (outs[0], lses[0]))):
        masked[:, :, 5 + number : 10] = 0.0
        masked_lse[:, :, 5 + number : 10] = -torch.inf
    found, found_lse = interpreted(launch_merge, out, lse, outs, lses)
    twin, twin_lse = merge_eager(out, lse, outs, lses)
    torch.testing.assert_close(found, twin, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_lse, twin_lse, rtol=1e-5, atol=1e-6)
    assert not found[:, :, 6:10].any()
    assert found_lse[:, :, 6:10].isneginf().all()


def on_a_gpu(number: int, *, dtype: torch.dtype = torch.float16) -> list[str]:
    """What the merge of so many parts runs on a GPU."""
    out, lse, outs, lses = parts(number, dtype=dtype)
    lse, *lses = (x.double() if dtype == torch.float64 else x for x in (lse, *lses))
    mode = FakeTensorMode()
    given = [Partial(on_gpu(mode, x), on_gpu(mode, y)) for x, y in zip((out, *outs), (lse, *lses), strict=True)]
    with mode, Calls() as calls:
        found = merge_partials(given)
    assert found.out_BNlD.shape == out.shape
    return [name for name in calls.names if not name.startswith("aten.empty")]


def test_one_launch_for_all_parts_on_a_gpu() -> None:
    assert on_a_gpu(1) == []
    assert on_a_gpu(2) == on_a_gpu(8) == ["patchpar.merge_attention.default"]
    assert "patchpar.merge_attention.default" not in on_a_gpu(2, dtype=torch.float64)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_parts_of_several_layouts_are_laid_alike(changed: int) -> None:
    out, _, outs, _ = parts(3)
    given = [out, *outs]
    assert all(x is y for x, y in zip(laid_alike(given), given, strict=True))
    given[changed] = torch.nn.functional.pad(given[changed], (0, 3))[..., :-3]
    found = laid_alike(given)
    assert len({x.stride() for x in found}) == 1
    assert all(torch.equal(x, y) for x, y in zip(found, given, strict=True))
