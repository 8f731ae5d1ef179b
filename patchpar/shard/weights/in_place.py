"""Blocks whose parts all lie in memory that this rank maps: what lies in one part is used there, and the rest copied.

    bytes of a block    |     rank 0    |     rank 1    |
    parameters          |   a   |    b      |    c   | d |
    used in place       a of rank 0, c and d of rank 1
    in the slot         b, of two parts

A CPU reads memory of another rank as fast as its own, and a copy takes the core that computes.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from patchpar.shard.weights.packed import PackedBlock, PackedTensor


class BlockInParts:
    """A block of which `parts` [bytes] of all ranks lie here; what is in several of them is copied into `slot` [bytes].

    `views`: tensors like those of the block, in the memory that they are to use. `copies`: pairs of bytes in the slot
    and in a part, each [bytes].
    """

    def __init__(self, block: PackedBlock, parts: Sequence[Tensor], slot: Tensor) -> None:
        self._parts, self._slot, self._size = parts, slot, parts[0].numel()
        self.views = [self._view(each) for each in block.tensors]
        split = {each.offset: each for each in block.tensors if self._part_of(each) is None}  # tied ones once
        self.copies = [pair for each in split.values() for pair in self._pairs(each)]

    def _part_of(self, packed: PackedTensor) -> int | None:
        """Return the part that a tensor lies in; None if there are several."""
        first, last = packed.offset // self._size, (packed.offset + packed.num_bytes - 1) // self._size
        return first if first == last else None

    def _view(self, packed: PackedTensor) -> Tensor:
        part = self._part_of(packed)
        if part is None:
            return packed.view(self._slot)
        return replace(packed, offset=packed.offset - part * self._size).view(self._parts[part])

    def _pairs(self, packed: PackedTensor) -> list[tuple[Tensor, Tensor]]:
        found, begin, end = [], packed.offset, packed.offset + packed.num_bytes
        while begin < end:
            part, start = divmod(begin, self._size)
            size = min(self._size - start, end - begin)
            found.append((self._slot.narrow(0, begin, size), self._parts[part].narrow(0, start, size)))
            begin += size
        return found
