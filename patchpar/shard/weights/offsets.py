"""Where the tensors of a block lie in its bytes: aligned, and as few as possible in several of the ranks' parts.

in the order of the modules    |  a  |   b    |   c    |      b and c of two parts each
as here                        |  a  | d |  b    |  c  |      none, or a small one, at each boundary
"""

from collections.abc import Sequence

ALIGNMENT = 64  # bytes: a cache line, and the widest load of a GPU


def part_bytes(num_bytes: int, num_parts: int) -> int:
    """Return the bytes of each of `num_parts` parts of a block; the last ones may be padding only."""
    return -(-num_bytes // (num_parts * ALIGNMENT)) * ALIGNMENT


def offsets_in_parts(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return the first byte of each tensor of these sizes [bytes], which lie one after the other in some order.

    In what is left of a part comes the largest that it has room for, and the smallest of all where it has for none.
    """
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    part = part_bytes(sum(aligned), num_parts)
    left = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    offsets, offset = [0] * len(sizes), 0
    while left:
        room = part - offset % part
        index = next((index for index in left if sizes[index] <= room), left[-1])
        left.remove(index)
        offsets[index], offset = offset, offset + aligned[index]
    return offsets
