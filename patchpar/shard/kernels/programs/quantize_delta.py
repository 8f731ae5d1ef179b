"""Triton programs of `quantize_delta` and `add_delta`: numbers at even and odd positions of a head, which share bytes.

Results have the bits of the twins: divisions are rounded as in IEEE 754, and a level times a scale is exact in fp32.
"""

import triton
import triton.language as tl

INTEGERS_ONLY = tl.constexpr(12582912.0)  # 1.5 * 2**23: fp32 has no fractions there


@triton.jit
def _positions(num_heads, WIDTH: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr):
    """Return heads of this program [HEADS, 1], pairs [1, PAIRS], the first of each in memory, masks of both."""
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    even = head.to(tl.int64) * WIDTH + 2 * pair
    return head, pair, even, (head < num_heads) & (2 * pair < WIDTH), (head < num_heads) & (2 * pair + 1 < WIDTH)


@triton.jit
def _level(difference, scale, MOST: tl.constexpr):
    """Return the nearest level, the even one of two; clamped before it is rounded, which comes to the same."""
    clamped = tl.minimum(tl.maximum(tl.div_rn(difference, scale), -MOST * 1.0), MOST * 1.0)
    return (clamped + INTEGERS_ONLY) - INTEGERS_ONLY


@triton.jit
def quantize_delta_program(
    copy,
    x,
    levels,
    scales,
    num_heads,
    MOST: tl.constexpr,
    IS_BYTE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write levels and scales of HEADS heads of `x`, and add them to `copy`."""
    head, pair, even, is_even, is_odd = _positions(num_heads, WIDTH, PAIRS, HEADS)
    old_even = tl.load(copy + even, mask=is_even, other=0.0).to(tl.float32)
    old_odd = tl.load(copy + even + 1, mask=is_odd, other=0.0).to(tl.float32)
    delta_even = tl.load(x + even, mask=is_even, other=0.0).to(tl.float32) - old_even
    delta_odd = tl.load(x + even + 1, mask=is_odd, other=0.0).to(tl.float32) - old_odd
    largest = tl.max(tl.maximum(tl.abs(delta_even), tl.abs(delta_odd)), axis=1)[:, None]
    most = tl.zeros_like(largest) + MOST
    scale = tl.minimum(tl.maximum(tl.div_rn(largest, most), 0.00006103515625), 60000.0).to(tl.float16)
    tl.store(scales + head, scale, mask=head < num_heads)
    wide = scale.to(tl.float32)
    level_even, level_odd = _level(delta_even, wide, MOST), _level(delta_odd, wide, MOST)
    tl.store(copy + even, (old_even + level_even * wide).to(copy.dtype.element_ty), mask=is_even)
    tl.store(copy + even + 1, (old_odd + level_odd * wide).to(copy.dtype.element_ty), mask=is_odd)
    if IS_BYTE:
        tl.store(levels + even, level_even.to(tl.int8), mask=is_even)
        tl.store(levels + even + 1, level_odd.to(tl.int8), mask=is_odd)
    else:
        high = tl.where(is_odd, level_odd.to(tl.int32) + 8, 0)
        both = (level_even.to(tl.int32) + 8) | (high << 4)
        at = head.to(tl.int64) * ((WIDTH + 1) // 2) + pair
        tl.store(levels + at, both.to(tl.uint8), mask=is_even)


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
