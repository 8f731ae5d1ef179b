"""Triton program of `fit_tokens`."""

import triton
import triton.language as tl


@triton.jit
def _mean_of_all(
    own,
    message,
    num_tokens,
    token_stride,
    pitch,
    lane,
    wide,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Return the mean [COLUMNS] over all tokens, and copy these to the message.

    After every thread has read samples of the last step, as before a sum of them ends: these may be in the message.
    """
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, num_tokens, ROWS):
        token = (base + lane).to(tl.int64)
        inside = (token < num_tokens) & wide
        now = tl.load(own + token * token_stride, mask=inside, other=0.0)
        if COPIES:
            tl.store(message + token * pitch, now, mask=inside)
        total += now.to(tl.float32)
    return tl.sum(total, 0) / num_tokens


@triton.jit
def _means_of_samples(
    own,
    tokens,
    tokens_before,
    step,
    samples,
    own_pitch,
    last_pitch,
    pitch,
    lane,
    wide,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
):
    """Return means [COLUMNS] over the sampled tokens: of the old ones, of their change, and of their line."""
    old_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    moved_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    way_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, samples, ROWS):
        sample = (base + lane).to(tl.int64)
        inside = (sample < samples) & wide
        now = tl.load(own + sample * own_pitch, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(tokens + sample * last_pitch, mask=inside, other=0.0).to(tl.float32)
        old_sum += old
        moved_sum += now - old
        if EXTRAPOLATES:
            before = tl.load(tokens_before + sample * pitch, mask=inside, other=0.0).to(tl.float32)
            way_sum += (old - before) * step
    return tl.sum(old_sum, 0) / samples, tl.sum(moved_sum, 0) / samples, tl.sum(way_sum, 0) / samples


@triton.jit
def _products_of_samples(
    own,
    tokens,
    tokens_before,
    step,
    samples,
    own_pitch,
    last_pitch,
    pitch,
    lane,
    wide,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
):
    """Return sums of products of centred samples, and make the samples of this step the last ones.

    Per channel of old and old, old and change, old and line; of all channels of line and line, line and change.
    """
    old_mean, moved_mean, way_mean = _means_of_samples(
        own, tokens, tokens_before, step, samples, own_pitch, last_pitch, pitch, lane, wide, ROWS, COLUMNS, EXTRAPOLATES
    )
    old_old = tl.zeros([ROWS, COLUMNS], tl.float32)
    old_moved = tl.zeros([ROWS, COLUMNS], tl.float32)
    old_way = tl.zeros([ROWS, COLUMNS], tl.float32)
    way_way = tl.zeros([ROWS, COLUMNS], tl.float32)
    way_moved = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, samples, ROWS):
        sample = (base + lane).to(tl.int64)
        inside = (sample < samples) & wide
        now = tl.load(own + sample * own_pitch, mask=inside, other=0.0)
        last = tl.load(tokens + sample * last_pitch, mask=inside, other=0.0)
        raw = last.to(tl.float32)
        old = tl.where(inside, raw - old_mean[None, :], 0.0)
        moved = tl.where(inside, now.to(tl.float32) - raw - moved_mean[None, :], 0.0)
        old_old += old * old
        old_moved += old * moved
        if EXTRAPOLATES:
            before = tl.load(tokens_before + sample * pitch, mask=inside, other=0.0).to(tl.float32)
            way = tl.where(inside, (raw - before) * step - way_mean[None, :], 0.0)
            old_way += old * way
            way_way += way * way
            way_moved += way * moved
            tl.store(tokens_before + sample * pitch, last, mask=inside)
        tl.store(tokens + sample * last_pitch, now, mask=inside)
    return tl.sum(old_old, 0), tl.sum(old_moved, 0), tl.sum(old_way, 0), tl.sum(way_way), tl.sum(way_moved)


@triton.jit
def _store_fit(into, along, scale, shift, column, WIDTH: tl.constexpr):
    """Write the fit of one head."""
    inside = column < WIDTH
    tl.store(into, along.to(into.dtype.element_ty))
    tl.store(into + 1 + column, scale.to(into.dtype.element_ty), mask=inside)
    tl.store(into + 1 + WIDTH + column, shift.to(into.dtype.element_ty), mask=inside)


@triton.jit
def fit_tokens_program(
    own,
    mean,
    tokens,
    mean_before,
    tokens_before,
    ratio,
    packed,
    message,
    num_tokens,
    samples,
    stride,
    token_stride,
    last_pitch,
    RIDGE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Write the fit of one head, of keys or values of one sample, and replace its samples."""
    head, pitch = tl.program_id(0), tl.num_programs(0) * WIDTH  # samples of the step before and messages are contiguous
    lane, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    inside, at = column < WIDTH, head * WIDTH + column
    own, tokens, tokens_before = own + at[None, :], tokens + at[None, :], tokens_before + at[None, :]
    step, wide, own_pitch = tl.load(ratio).to(tl.float32), inside[None, :], stride * token_stride
    last_mean = tl.load(mean + at, mask=inside, other=0.0)  # before the sums: their barriers are ahead of the stores
    mean_way = tl.zeros([COLUMNS], tl.float32)
    if EXTRAPOLATES:
        mean_way = (last_mean - tl.load(mean_before + at, mask=inside, other=0.0)) * step
    old_old, old_moved, old_way, way_way, way_moved = _products_of_samples(
        own, tokens, tokens_before, step, samples, own_pitch, last_pitch, pitch, lane, wide, ROWS, COLUMNS, EXTRAPOLATES
    )
    now_mean = _mean_of_all(
        own, message + at[None, :], num_tokens, token_stride, pitch, lane, wide, ROWS, COLUMNS, COPIES
    )
    along = way_moved / (samples * WIDTH) / (way_way / (samples * WIDTH) + TINY)
    along = tl.minimum(tl.maximum(along, LEAST), MOST).to(packed.dtype.element_ty).to(tl.float32)
    square = old_old / samples
    scale = (old_moved - along * old_way) / samples / (square + RIDGE * (tl.sum(square, 0) / WIDTH) + TINY)
    shift = now_mean - last_mean - scale * last_mean - along * mean_way
    _store_fit(packed + head * (1 + 2 * WIDTH), along, scale, shift, column, WIDTH)
    tl.store(mean + at, now_mean, mask=inside)
    if EXTRAPOLATES:
        tl.store(mean_before + at, last_mean, mask=inside)
