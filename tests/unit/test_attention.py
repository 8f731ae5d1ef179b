"""Attention to parts of the keys, merged, is attention to all of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from patchpar.shard.attention.partial import Partial, attend_locally, merge_partials


def heads(tokens: int, *, gain: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (gain * torch.randn(2, 3, tokens, 16)).to(dtype)


@pytest.mark.parametrize("starts", [(0, 40), (0, 20, 40), (0, 1, 40), (0, 7, 19, 40), (0, 30, 31, 32, 40)])
@pytest.mark.parametrize("gain", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_merged_partials(starts: tuple[int, ...], gain: float, scale: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = heads(9, gain=gain), heads(40), heads(40)
    parts = (attend_locally(q, k[:, :, a:b], v[:, :, a:b], scale=scale) for a, b in pairwise(starts))
    torch.testing.assert_close(merge_partials(parts).out_BNlD, attention(q, k, v, scale=scale), atol=1e-5, rtol=1e-5)


def test_the_order_of_arrival_does_not_matter() -> None:
    torch.manual_seed(0)
    q, k, v = heads(9, gain=3.0), heads(40), heads(40)
    parts = [attend_locally(q, k[:, :, i : i + 10], v[:, :, i : i + 10]) for i in range(0, 40, 10)]
    torch.testing.assert_close(
        merge_partials(parts[::-1]).out_BNlD, merge_partials(parts).out_BNlD, atol=1e-6, rtol=1e-6
    )


def test_without_the_others_keys_it_is_wrong() -> None:
    torch.manual_seed(0)
    q, k, v = heads(9), heads(40), heads(40)
    assert (attend_locally(q, k[:, :, :20], v[:, :, :20]).out_BNlD - attention(q, k, v)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_merging_adds_less_than_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (heads(tokens, gain=gain, dtype=dtype) for tokens, gain in ((64, 3.0), (256, 1.0), (256, 1.0)))
    oracle = attention(q.double(), k.double(), v.double())
    merged = merge_partials(attend_locally(q, k[:, :, i : i + 64], v[:, :, i : i + 64]) for i in range(0, 256, 64))
    assert merged.out_BNlD.dtype == dtype
    ours, torchs = ((x.double() - oracle).norm() for x in (merged.out_BNlD, attention(q, k, v)))
    assert ours < 2 * torchs


def test_the_log_sum_exp_of_the_kernel() -> None:
    """Where torch's private kernel changes its meaning, this fails first."""
    torch.manual_seed(0)
    q, k, v = heads(9), heads(40), heads(40)
    expected = (q @ k.mT / math.sqrt(16)).logsumexp(-1)
    torch.testing.assert_close(attend_locally(q, k, v).lse_BNl, expected, atol=1e-5, rtol=1e-5)


def test_a_part_far_below_the_others_leaves_no_trace() -> None:
    out = torch.ones(1, 1, 2, 4)
    near, far = Partial(out, torch.zeros(1, 1, 2)), Partial(9 * out, torch.full((1, 1, 2), -1e4))
    assert torch.equal(merge_partials([near, far]).out_BNlD, out)
    assert torch.equal(merge_partials([far, near]).out_BNlD, out)


def test_the_smallest_number_of_a_wider_dtype_masks_all_keys() -> None:
    q, k, v = torch.randn(3, 1, 1, 2, 8, generator=torch.Generator().manual_seed(0)).half()
    bias = torch.tensor([[0.0, 0.0], [torch.finfo(torch.float32).min] * 2])
    out, lse = attend_locally(q, k, v, bias=bias)
    assert lse[0, 0].isneginf().tolist() == [False, True]
    assert bool(out[0, 0, 0].any())
    assert not bool(out[0, 0, 1].any())
