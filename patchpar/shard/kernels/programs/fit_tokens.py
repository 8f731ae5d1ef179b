"""Triton program of `fit_tokens`."""

import triton
import triton.language as tl


@triton.jit
def fit_tokens_program(
    own,
    mean,
    tokens,
    mean_before,
    tokens_before,
    ratio,
    packed,
    num_tokens,
    num_samples,
    stride,
    token_stride,
    RIDGE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
):
    """Write the fit of one head, of keys or values of one sample, and replace its samples.

    A first pass over all tokens has the means, a second one over the sampled ones what is centred at them.
    """
    head = tl.program_id(0)
    sample_stride = tl.num_programs(0) * WIDTH  # the samples are contiguous
    lane, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    wide = column < WIDTH
    at = head * WIDTH + column[None, :]
    own, tokens, tokens_before = own + at, tokens + at, tokens_before + at
    mean, mean_before = mean + head * WIDTH + column, mean_before + head * WIDTH + column
    step = tl.load(ratio).to(tl.float32)
    old_mean = tl.load(mean, mask=wide, other=0.0)  # before the sums: their barriers lie between this and the store
    mean_way = tl.zeros([COLUMNS], tl.float32)
    if EXTRAPOLATES:
        mean_way = (old_mean - tl.load(mean_before, mask=wide, other=0.0)) * step
    sum_own = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, num_tokens, ROWS):
        token = base + lane
        inside = (token < num_tokens) & wide[None, :]
        sum_own += tl.load(own + token.to(tl.int64) * token_stride, mask=inside, other=0.0).to(tl.float32)
    sum_old = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum_moved = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum_way = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, num_samples, ROWS):
        sample = base + lane
        inside = (sample < num_samples) & wide[None, :]
        now = tl.load(own + sample.to(tl.int64) * stride * token_stride, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(tokens + sample.to(tl.int64) * sample_stride, mask=inside, other=0.0).to(tl.float32)
        sum_old += old
        sum_moved += now - old
        if EXTRAPOLATES:
            before = tl.load(tokens_before + sample.to(tl.int64) * sample_stride, mask=inside, other=0.0)
            sum_way += (old - before.to(tl.float32)) * step
    few_old, few_moved = tl.sum(sum_old, 0) / num_samples, tl.sum(sum_moved, 0) / num_samples
    few_way = tl.sum(sum_way, 0) / num_samples
    old_old = tl.zeros([ROWS, COLUMNS], tl.float32)
    old_moved = tl.zeros([ROWS, COLUMNS], tl.float32)
    old_way = tl.zeros([ROWS, COLUMNS], tl.float32)
    way_way = tl.zeros([ROWS, COLUMNS], tl.float32)
    way_moved = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, num_samples, ROWS):
        sample = base + lane
        inside = (sample < num_samples) & wide[None, :]
        from_old = tokens + sample.to(tl.int64) * sample_stride
        now = tl.load(own + sample.to(tl.int64) * stride * token_stride, mask=inside, other=0.0)
        last = tl.load(from_old, mask=inside, other=0.0)
        old = last.to(tl.float32)
        moved = tl.where(inside, now.to(tl.float32) - old - few_moved[None, :], 0.0)
        if EXTRAPOLATES:
            from_before = tokens_before + sample.to(tl.int64) * sample_stride
            before = tl.load(from_before, mask=inside, other=0.0).to(tl.float32)
            way = tl.where(inside, (old - before) * step - few_way[None, :], 0.0)
            tl.store(from_before, last, mask=inside)
            way_way += way * way
            way_moved += way * moved
            old_way += tl.where(inside, old - few_old[None, :], 0.0) * way
        tl.store(from_old, now.to(last.dtype), mask=inside)
        old = tl.where(inside, old - few_old[None, :], 0.0)
        old_old += old * old
        old_moved += old * moved
    values = num_samples * WIDTH
    along = tl.sum(way_moved) / values / (tl.sum(way_way) / values + TINY)
    along = tl.minimum(tl.maximum(along, LEAST), MOST).to(packed.dtype.element_ty).to(tl.float32)
    square = tl.sum(old_old, 0) / num_samples
    pull = RIDGE * (tl.sum(square, 0) / WIDTH) + TINY
    scale = (tl.sum(old_moved, 0) - along * tl.sum(old_way, 0)) / num_samples / (square + pull)
    now_mean = tl.sum(sum_own, 0) / num_tokens
    shift = now_mean - old_mean - scale * old_mean - along * mean_way
    if EXTRAPOLATES:
        tl.store(mean_before, old_mean, mask=wide)
    tl.store(mean, now_mean, mask=wide)
    into = packed + head * (1 + 2 * WIDTH)
    tl.store(into, along.to(packed.dtype.element_ty))
    tl.store(into + 1 + column, scale.to(packed.dtype.element_ty), mask=wide)
    tl.store(into + 1 + WIDTH + column, shift.to(packed.dtype.element_ty), mask=wide)
