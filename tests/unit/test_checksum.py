"""Checksums of samples: another value, order, sign or shape of memory is another one; strides are not."""

from __future__ import annotations

import pytest
import torch

from patchpar.pipeline.tensor_bytes import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_have_equal_checksums(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert turned.stride() != x.stride()
    assert checksum([x]) == checksum([turned]) == checksum([x.clone()])
    assert checksum([x]).dtype == torch.int64


def test_one_bit_makes_a_difference() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = {int(checksum([x]))}
    for position in range(1000):
        bits = x.clone().view(torch.int32)
        bits[position] ^= 1 << (position % 31)
        found.add(int(checksum([bits.view(torch.float32)])))
    assert len(found) == 1001


def test_order_and_number_of_tensors_make_a_difference() -> None:
    x, y = torch.arange(6.0), torch.arange(6.0).flip(0)
    sums = [checksum(each) for each in ([x, y], [y, x], [x], [torch.cat([x, y])], [x, y, x[:0]], [])]
    assert len({int(each) for each in sums}) == len(sums)
    assert checksum([torch.tensor([0.0, -0.0])]) != checksum([torch.tensor([-0.0, 0.0])])
