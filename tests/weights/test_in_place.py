"""Blocks whose parts are all mapped: the parts and the copied rest are the block, whatever its tensors and ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchpar.shard.weights.in_place import BlockInParts
from patchpar.shard.weights.packed import NAN_BYTE, PackedBlock, packed_blocks
from tests.weights import networks

CPU = torch.device("cpu")


def parts_of(block: PackedBlock, ranks: int) -> list[Tensor]:
    size = block.shard_bytes(ranks)
    parts = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
    for rank, part in enumerate(parts):
        block.write(part, rank * size)
    return parts


def lies_in(x: Tensor, memory: Tensor) -> bool:
    return 0 <= x.data_ptr() - memory.data_ptr() < memory.numel()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_they_are_the_block(name: str, ranks: int) -> None:
    for block in packed_blocks(networks.build(name), CPU, ranks=ranks):
        parts, slot = parts_of(block, ranks), torch.full((ranks * block.shard_bytes(ranks),), NAN_BYTE).byte()
        found = BlockInParts(block, parts, slot)
        for into, x in found.copies:
            into.copy_(x)
        in_slot = 0
        for each, view in zip(block.tensors, found.views, strict=True):
            assert torch.equal(view, each.tensor)
            assert view.stride() == each.stride
            homes = [part for part in parts if lies_in(view, part)]
            in_slot += 0 if homes else each.num_bytes
            assert len(homes) == (0 if lies_in(view, slot) else 1)
        copied = sum(x.numel() for _, x in found.copies)
        assert copied <= in_slot, "tied ones once"
        assert (copied == 0) == (in_slot == 0)
        assert in_slot == 0 or ranks > 1


def test_without_the_copies_what_lies_in_several_parts_is_missing() -> None:
    (block, *_) = packed_blocks(networks.build("chain"), CPU, ranks=2)
    slot = torch.full((2 * block.shard_bytes(2),), NAN_BYTE).byte()
    found = BlockInParts(block, parts_of(block, 2), slot)
    pairs = list(zip(block.tensors, found.views, strict=True))
    assert {torch.equal(view, each.tensor) for each, view in pairs} == {True, False}
