"""Triton program of `add_delta`: numbers at even and odd positions of a head share bytes.

Results have the bits of the twin: a level times a scale is exact in fp32.
"""

import triton
import triton.language as tl


@triton.jit
def _positions(num_heads, WIDTH: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr):
    """Return heads of this program [HEADS, 1], pairs [1, PAIRS], the first of each in memory, masks of both."""
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    even = head.to(tl.int64) * WIDTH + 2 * pair
    return head, pair, even, (head < num_heads) & (2 * pair < WIDTH), (head < num_heads) & (2 * pair + 1 < WIDTH)


@triton.jit
def _add_delta(
    copy,
    levels,
    scales,
    num_heads,
    IS_BYTE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Add levels times scales to HEADS of the `num_heads` heads of `copy`."""
    head, pair, even, is_even, is_odd = _positions(num_heads, WIDTH, PAIRS, HEADS)
    wide = tl.load(scales + head, mask=head < num_heads, other=0.0).to(tl.float32)
    if IS_BYTE:
        level_even = tl.load(levels + even, mask=is_even, other=0).to(tl.float32)
        level_odd = tl.load(levels + even + 1, mask=is_odd, other=0).to(tl.float32)
    else:
        at = head.to(tl.int64) * ((WIDTH + 1) // 2) + pair
        both = tl.load(levels + at, mask=is_even, other=0).to(tl.int32)
        level_even, level_odd = ((both & 15) - 8).to(tl.float32), ((both >> 4) - 8).to(tl.float32)
    old_even = tl.load(copy + even, mask=is_even, other=0.0).to(tl.float32)
    old_odd = tl.load(copy + even + 1, mask=is_odd, other=0.0).to(tl.float32)
    tl.store(copy + even, (old_even + level_even * wide).to(copy.dtype.element_ty), mask=is_even)
    tl.store(copy + even + 1, (old_odd + level_odd * wide).to(copy.dtype.element_ty), mask=is_odd)


@triton.jit(do_not_specialize=["starts", "counts"])  # or each shape were compiled anew
def add_delta_program(
    copy,
    levels,
    scales,
    starts,
    counts,
    MESSAGES: tl.constexpr,
    IS_BYTE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Add levels times scales to HEADS heads of one of MESSAGES parts of `copy`.

    All others are tuples: pointers to the levels and scales of each message, the element of `copy` where its heads
    begin, and how many they are.
    """
    message = tl.program_id(1)
    for index in tl.static_range(MESSAGES):
        if message == index:
            part = copy + starts[index]
            _add_delta(part, levels[index], scales[index], counts[index], IS_BYTE, WIDTH, PAIRS, HEADS)
