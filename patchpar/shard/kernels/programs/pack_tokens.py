"""Triton programs of `pack_tokens`."""

import triton
import triton.language as tl

INTEGERS_ONLY = tl.constexpr(12582912.0)  # 1.5 * 2**23: fp32 has no fractions there


@triton.jit
def _averages(own, windows, window, inside, lane, in_width, size, POOL: tl.constexpr):
    """Return averages over windows [ROWS, 1] of the numbers of a token at `lane` [1, COLUMNS], rounded as `own` is."""
    entry = windows + window.to(tl.int64) * 5
    first = tl.load(entry, mask=inside, other=0).to(tl.int64)
    total = tl.load(own + first * size + lane, mask=inside & in_width, other=0.0).to(tl.float32)
    if POOL > 1:
        rows, columns = tl.load(entry + 1, mask=inside, other=1), tl.load(entry + 2, mask=inside, other=1)
        row_step, column_step = tl.load(entry + 3, mask=inside, other=0), tl.load(entry + 4, mask=inside, other=0)
        for index in range(1, POOL * POOL):
            row, column = index // POOL, index % POOL
            there = inside & (row < rows) & (column < columns) & in_width
            token = first + row * row_step + column * column_step
            total += tl.load(own + token * size + lane, mask=there, other=0.0).to(tl.float32)
        total = tl.div_rn(total, (tl.zeros_like(total) + rows * columns))
    return total.to(own.dtype.element_ty)


@triton.jit
def average_tokens_program(
    buffer,
    own,
    windows,
    table,
    length,
    POOL: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the averages of ROWS windows of a run, of one head, to each of its receivers."""
    head, heads, run = tl.program_id(1), tl.num_programs(1), table + tl.program_id(2) * length
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside, in_width, size = index < tl.load(run + 1), column < WIDTH, heads.to(tl.int64) * WIDTH
    lane = head * WIDTH + column
    x = _averages(own, windows, tl.load(run) + index, inside, lane, in_width, size, POOL)
    for receiver in range(tl.load(run + 2)):
        target = buffer + tl.load(run + 3 + 2 * receiver).to(tl.int64) * 16
        values = target.to(tl.pointer_type(own.dtype.element_ty), bitcast=True)
        tl.store(values + index.to(tl.int64) * size + lane, x, mask=inside & in_width)


@triton.jit
def _level(difference, scale, MOST: tl.constexpr):
    """Return the nearest level, the even one of two; clamped before it is rounded, which comes to the same."""
    clamped = tl.minimum(tl.maximum(tl.div_rn(difference, scale), -MOST * 1.0), MOST * 1.0)
    return (clamped + INTEGERS_ONLY) - INTEGERS_ONLY


@triton.jit
def _scales(delta_even, delta_odd, MOST: tl.constexpr):
    """Return the scale of each head [ROWS, 1] in fp16, from its differences at even and odd positions."""
    largest = tl.max(tl.maximum(tl.abs(delta_even), tl.abs(delta_odd)), axis=1)[:, None]
    most = tl.zeros_like(largest) + MOST
    return tl.minimum(tl.maximum(tl.div_rn(largest, most), 0.00006103515625), 60000.0).to(tl.float16)


@triton.jit
def _store_levels(
    target, token, level_even, level_odd, pair, is_even, is_odd, WIDTH: tl.constexpr, IS_BYTE: tl.constexpr
):
    """Write the levels of heads, of which `token` [ROWS, 1] counts those before them."""
    if IS_BYTE:
        levels = target.to(tl.pointer_type(tl.int8), bitcast=True) + token * WIDTH + 2 * pair
        tl.store(levels, level_even.to(tl.int8), mask=is_even)
        tl.store(levels + 1, level_odd.to(tl.int8), mask=is_odd)
    else:
        high = tl.where(is_odd, level_odd.to(tl.int32) + 8, 0)
        both = (level_even.to(tl.int32) + 8) | (high << 4)
        tl.store(target + token * ((WIDTH + 1) // 2) + pair, both.to(tl.uint8), mask=is_even)


@triton.jit
def quantize_tokens_program(
    buffer,
    own,
    copy,
    windows,
    table,
    length,
    POOL: tl.constexpr,
    MOST: tl.constexpr,
    IS_BYTE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write levels and scales of ROWS windows of a run, of one head, to each of its receivers, and add them to `copy`.

    Numbers at even and odd positions of a head share a byte. Results have the bits of the twin: divisions are rounded
    as in IEEE 754, and a level times a scale is exact in fp32.
    """
    head, heads, run = tl.program_id(1), tl.num_programs(1), table + tl.program_id(2) * length
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside, size = index < tl.load(run + 1), heads.to(tl.int64) * WIDTH
    even_in, odd_in, lane, window = (
        2 * pair < WIDTH,
        2 * pair + 1 < WIDTH,
        head * WIDTH + 2 * pair,
        tl.load(run) + index,
    )
    is_even, is_odd = inside & even_in, inside & odd_in
    even = _averages(own, windows, window, inside, lane, even_in, size, POOL).to(tl.float32)
    odd = _averages(own, windows, window, inside, lane + 1, odd_in, size, POOL).to(tl.float32)
    held = copy + window.to(tl.int64) * size + lane
    old_even = tl.load(held, mask=is_even, other=0.0).to(tl.float32)
    old_odd = tl.load(held + 1, mask=is_odd, other=0.0).to(tl.float32)
    delta_even, delta_odd = tl.where(is_even, even - old_even, 0.0), tl.where(is_odd, odd - old_odd, 0.0)
    scale = _scales(delta_even, delta_odd, MOST)
    wide = scale.to(tl.float32)
    level_even, level_odd = _level(delta_even, wide, MOST), _level(delta_odd, wide, MOST)
    tl.debug_barrier()  # Triton may let another thread write what this one reads (triton-lang/triton#10924)
    tl.store(held, (old_even + level_even * wide).to(copy.dtype.element_ty), mask=is_even)
    tl.store(held + 1, (old_odd + level_odd * wide).to(copy.dtype.element_ty), mask=is_odd)
    token = index.to(tl.int64) * heads + head
    for receiver in range(tl.load(run + 2)):
        offsets = run + 3 + 2 * receiver
        levels = buffer + tl.load(offsets).to(tl.int64) * 16
        _store_levels(levels, token, level_even, level_odd, pair, is_even, is_odd, WIDTH, IS_BYTE)
        scales = (buffer + tl.load(offsets + 1).to(tl.int64) * 16).to(tl.pointer_type(tl.float16), bitcast=True)
        tl.store(scales + token, scale, mask=inside)
