"""Tensors of a block one after the other: none overlap, no byte more than in any other order, few in several parts."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from patchpar.shard.weights.offsets import ALIGNMENT, offsets_in_parts, part_bytes


def bytes_in_several(sizes: list[int], offsets: list[int], num_parts: int) -> int:
    part = part_bytes(max(offset + size for size, offset in zip(sizes, offsets, strict=True)), num_parts)
    pairs = zip(sizes, offsets, strict=True)
    return sum(size for size, offset in pairs if offset // part != (offset + size - 1) // part)


def in_order(sizes: list[int]) -> list[int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8])
def test_tensors_follow_each_other(num_parts: int) -> None:
    random = Random(0)
    for _ in range(50):
        sizes = [random.choice([4, 100, 4096, 65536, 600_000]) for _ in range(random.randrange(1, 30))]
        offsets = offsets_in_parts(sizes, num_parts)
        assert not any(offset % ALIGNMENT for offset in offsets)
        order = sorted(range(len(sizes)), key=offsets.__getitem__)
        for before, after in pairwise(order):
            assert 0 <= offsets[after] - (offsets[before] + sizes[before]) < ALIGNMENT
        assert part_bytes(max(map(sum, zip(sizes, offsets, strict=True))), num_parts) == part_bytes(
            max(map(sum, zip(sizes, in_order(sizes), strict=True))), num_parts
        ), "the parts of any order"


@pytest.mark.parametrize("num_parts", [2, 4])
def test_few_bytes_are_in_several_parts(num_parts: int) -> None:
    sizes = [102400, 409600, 614400, 409600, 256, 102400, 614400, 409600, 320, 409600, 102400, 102400, 640, 640]
    found = bytes_in_several(sizes, offsets_in_parts(sizes, num_parts), num_parts)
    assert found < 0.05 * sum(sizes)
    assert bytes_in_several(sizes, in_order(sizes), 4) > 0.2 * sum(sizes), "the control"
