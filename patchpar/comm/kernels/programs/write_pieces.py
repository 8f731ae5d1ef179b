"""Triton program of `write_pieces`."""

import triton
import triton.language as tl


@triton.jit
def _copy(source, target, count, sizes, strides, FIRST: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this program's BLOCK of the `count` elements of a strided tensor, whose last of DIMS is at FIRST."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    rest = at
    offset = tl.zeros([BLOCK], tl.int64)
    for dim in tl.static_range(DIMS):
        size = sizes[FIRST + dim]
        offset += (rest % size).to(tl.int64) * strides[FIRST + dim]
        rest = rest // size
    tl.store(target + at, tl.load(source + offset, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["numbers", "starts", "counts", "sizes", "strides"])  # or each shape were compiled anew
def write_pieces_program(
    buffer,
    tensors,
    numbers,
    starts,
    counts,
    sizes,
    strides,
    PIECES: tl.constexpr,
    COUNT: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of one of PIECES to its offset in `buffer`.

    All others are tuples: COUNT pointers with their numbers of elements, and DIMS sizes and strides of each, the last
    first; which of them each piece is, and the element of `buffer` where it begins.
    """
    piece = tl.program_id(1)
    number, start = numbers[0], starts[0]
    for index in tl.static_range(1, PIECES):
        number = tl.where(piece == index, numbers[index], number)
        start = tl.where(piece == index, starts[index], start)
    for index in tl.static_range(COUNT):
        if number == index:
            source = tensors[index]
            target = (buffer + start).to(tl.pointer_type(source.dtype.element_ty), bitcast=True)
            _copy(source, target, counts[index], sizes, strides, index * DIMS, DIMS, BLOCK)
