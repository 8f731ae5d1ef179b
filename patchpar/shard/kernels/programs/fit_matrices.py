"""Triton program of `center_tokens`."""

import triton
import triton.language as tl

from patchpar.shard.kernels.programs.fit_tokens import _mean_and_way, _store_means


@triton.jit
def _mean_and_products(
    own,
    tokens,
    tokens_before,
    mean_way,
    step,
    num_tokens,
    token_stride,
    pitch,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
):
    """Return the mean [COLUMNS] of all tokens, and sums of products of all channels: line and line, line and change."""
    lane, wide = tl.arange(0, ROWS)[:, None], (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    way_way = tl.zeros([ROWS, COLUMNS], tl.float32)
    way_moved = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, num_tokens, ROWS):
        token = (base + lane).to(tl.int64)
        inside = (token < num_tokens) & wide
        now = tl.load(own + token * token_stride, mask=inside, other=0.0).to(tl.float32)
        total += now
        if EXTRAPOLATES:
            last = tl.load(tokens + token * pitch, mask=inside, other=0.0).to(tl.float32)
            before = tl.load(tokens_before + token * pitch, mask=inside, other=0.0).to(tl.float32)
            way = tl.where(inside, (last - before) * step - mean_way[None, :], 0.0)
            way_way += way * way
            way_moved += way * (now - last)
    return tl.sum(total, 0) / num_tokens, tl.sum(way_way), tl.sum(way_moved)


@triton.jit
def _write_pairs(
    own,
    tokens,
    tokens_before,
    pairs,
    means,
    step,
    line,
    sizes,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
    BEFOREHAND: tl.constexpr,
):
    """Write what is held and missing of each token, make these tokens the last ones; return squares of what is held."""
    lane, wide = tl.arange(0, ROWS)[:, None], (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    last_mean, moved_mean, mean_way = means
    num_tokens, token_stride, pitch = sizes
    for base in range(0, num_tokens, ROWS):
        token = (base + lane).to(tl.int64)
        inside = (token < num_tokens) & wide
        now = tl.load(own + token * token_stride, mask=inside, other=0.0)
        last = tl.load(tokens + token * pitch, mask=inside, other=0.0)
        held = tl.where(inside, last.to(tl.float32) - last_mean[None, :], 0.0)
        missing = now.to(tl.float32) - last.to(tl.float32) - moved_mean[None, :]
        if EXTRAPOLATES:
            before = tl.load(tokens_before + token * pitch, mask=inside, other=0.0).to(tl.float32)
            way = tl.where(inside, (last.to(tl.float32) - before) * step - mean_way[None, :], 0.0)
            missing -= line * way
            if BEFOREHAND:
                held += line * way
            tl.debug_barrier()  # or another thread writes what this one reads (triton-lang/triton#10924)
            tl.store(tokens_before + token * pitch, last, mask=inside)
        tl.debug_barrier()
        tl.store(tokens + token * pitch, now, mask=inside)
        tl.store(pairs + token * 2 * WIDTH, held, mask=inside)
        tl.store(pairs + token * 2 * WIDTH + WIDTH, missing, mask=inside)
        squares += held * held
    return tl.sum(squares)


@triton.jit
def _fraction(way_moved, way_way, size, LEAST: tl.constexpr, MOST: tl.constexpr, TINY: tl.constexpr):
    """Return how much of their line the tokens went."""
    return tl.minimum(tl.maximum(way_moved / size / (way_way / size + TINY), LEAST), MOST)


@triton.jit
def _store_numbers(row, line, ridge, shift, held_mean, column, inside, WIDTH: tl.constexpr):
    """Write the numbers of one head."""
    tl.store(row, line)
    tl.store(row + 1, ridge)
    tl.store(row + 2 + column, shift, mask=inside)
    tl.store(row + 2 + WIDTH + column, held_mean, mask=inside)


@triton.jit
def center_tokens_program(
    own,
    mean,
    tokens,
    mean_before,
    tokens_before,
    along,
    ratio,
    pairs,
    numbers,
    num_tokens,
    token_stride,
    RIDGE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
    BEFOREHAND: tl.constexpr,
):
    """Write what the fit of one head reads, of keys or values of one sample, and replace its samples."""
    head, pitch, column = tl.program_id(0), tl.num_programs(0) * WIDTH, tl.arange(0, COLUMNS)  # what is kept is dense
    inside, at = column < WIDTH, head * WIDTH + column
    own, last, before = own + at[None, :], tokens + at[None, :], tokens_before + at[None, :]
    last_mean, mean_way = _mean_and_way(mean + at, mean_before + at, ratio, inside, COLUMNS, EXTRAPOLATES)
    step = tl.load(ratio).to(tl.float32)
    now_mean, way_way, way_moved = _mean_and_products(
        own, last, before, mean_way, step, num_tokens, token_stride, pitch, WIDTH, ROWS, COLUMNS, EXTRAPOLATES
    )
    found = _fraction(way_moved, way_way, num_tokens * WIDTH, LEAST, MOST, TINY).to(own.dtype.element_ty).to(tl.float32)
    line, held_mean = found, last_mean
    if BEFOREHAND:
        line = tl.load(along + head)
        held_mean = last_mean + line * mean_way
        tl.store(along + head, found)
    if not EXTRAPOLATES:
        line = LEAST
    into = pairs + head.to(tl.int64) * num_tokens * 2 * WIDTH + column[None, :]
    means = (last_mean, now_mean - last_mean, mean_way)
    sizes = (num_tokens, token_stride, pitch)
    squares = _write_pairs(
        own, last, before, into, means, step, line, sizes, WIDTH, ROWS, COLUMNS, EXTRAPOLATES, BEFOREHAND
    )
    shift, ridge = now_mean - last_mean - line * mean_way, RIDGE * (squares / WIDTH) + TINY
    _store_numbers(numbers + head * (2 + 2 * WIDTH), line, ridge, shift, held_mean, column, inside, WIDTH)
    _store_means(mean + at, mean_before + at, now_mean, last_mean, inside, EXTRAPOLATES)
