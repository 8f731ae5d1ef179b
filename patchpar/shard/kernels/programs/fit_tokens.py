"""Triton programs of `fit_tokens` and `sample_tokens`."""

import triton
import triton.language as tl


@triton.jit
def _mean_of_all(
    own,
    tokens,
    tokens_before,
    num_tokens,
    token_stride,
    pitch,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    """Return the mean [COLUMNS] over all tokens, and if it `KEEPS_ALL`, store these as the last ones.

    What was there, or unless it `CONTINUES` these tokens too, becomes what was before.
    """
    lane, wide = tl.arange(0, ROWS)[:, None], (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if KEEPS_ALL:
        tl.debug_barrier()  # every thread has read its samples, which are among the tokens kept
    for base in range(0, num_tokens, ROWS):
        token = (base + lane).to(tl.int64)
        inside = (token < num_tokens) & wide
        now = tl.load(own + token * token_stride, mask=inside, other=0.0)
        total += now.to(tl.float32)
        if KEEPS_ALL:
            if HAS_BEFORE:
                last = now
                if CONTINUES:
                    last = tl.load(tokens + token * pitch, mask=inside, other=0.0)
                    tl.debug_barrier()  # or another thread writes what this one reads (triton-lang/triton#10924)
                tl.store(tokens_before + token * pitch, last, mask=inside)
            tl.store(tokens + token * pitch, now, mask=inside)
    return tl.sum(total, 0) / num_tokens


@triton.jit
def _means_of_samples(
    own,
    tokens,
    tokens_before,
    step,
    samples,
    own_pitch,
    pitch,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
):
    """Return means [COLUMNS] over the sampled tokens: of the old ones, of their change, and of their line."""
    lane, wide = tl.arange(0, ROWS)[:, None], (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    old_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    moved_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    way_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(0, samples, ROWS):
        sample = (base + lane).to(tl.int64)
        inside = (sample < samples) & wide
        now = tl.load(own + sample * own_pitch, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(tokens + sample * pitch, mask=inside, other=0.0).to(tl.float32)
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
    pitch,
    used,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
):
    """Return sums of products of centred samples, and make those of this step the last ones, unless all are kept.

    Per channel of old and old, old and change, old and line; of all channels of line and line, line and change. `old`
    are tokens of the last step, moved `used` times their line.
    """
    old_mean, moved_mean, way_mean = _means_of_samples(
        own, tokens, tokens_before, step, samples, own_pitch, pitch, WIDTH, ROWS, COLUMNS, EXTRAPOLATES
    )
    lane, wide = tl.arange(0, ROWS)[:, None], (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    old_old, old_moved, old_way, way_way, way_moved = zero, zero, zero, zero, zero
    for base in range(0, samples, ROWS):
        sample = (base + lane).to(tl.int64)
        inside = (sample < samples) & wide
        now = tl.load(own + sample * own_pitch, mask=inside, other=0.0)
        last = tl.load(tokens + sample * pitch, mask=inside, other=0.0)
        raw = last.to(tl.float32)
        old = tl.where(inside, raw - old_mean[None, :], 0.0)
        moved = tl.where(inside, now.to(tl.float32) - raw - moved_mean[None, :], 0.0)
        if EXTRAPOLATES:
            before = tl.load(tokens_before + sample * pitch, mask=inside, other=0.0).to(tl.float32)
            way = tl.where(inside, (raw - before) * step - way_mean[None, :], 0.0)
            old += used * way
            old_way += old * way
            way_way += way * way
            way_moved += way * moved
            if not KEEPS_ALL:
                tl.debug_barrier()  # as above
                tl.store(tokens_before + sample * pitch, last, mask=inside)
        old_old += old * old
        old_moved += old * moved
        if not KEEPS_ALL:
            tl.debug_barrier()
            tl.store(tokens + sample * pitch, now, mask=inside)
    return tl.sum(old_old, 0), tl.sum(old_moved, 0), tl.sum(old_way, 0), tl.sum(way_way), tl.sum(way_moved)


@triton.jit
def _store_fit(into, along, scale, shift, column, WIDTH: tl.constexpr):
    """Write the fit of one head."""
    inside = column < WIDTH
    tl.store(into, along.to(into.dtype.element_ty))
    tl.store(into + 1 + column, scale.to(into.dtype.element_ty), mask=inside)
    tl.store(into + 1 + WIDTH + column, shift.to(into.dtype.element_ty), mask=inside)


@triton.jit
def _mean_and_way(mean, mean_before, ratio, inside, COLUMNS: tl.constexpr, EXTRAPOLATES: tl.constexpr):
    """Return the mean [COLUMNS] of the last step, and its way from the one before."""
    last = tl.load(mean, mask=inside, other=0.0)
    way = tl.zeros([COLUMNS], tl.float32)
    if EXTRAPOLATES:
        way = (last - tl.load(mean_before, mask=inside, other=0.0)) * tl.load(ratio).to(tl.float32)
    return last, way


@triton.jit
def _store_means(mean, mean_before, now, last, inside, EXTRAPOLATES: tl.constexpr):
    """Make the mean of this step that of the last one, and that of the last one what was before."""
    tl.store(mean, now, mask=inside)
    if EXTRAPOLATES:
        tl.store(mean_before, last, mask=inside)


@triton.jit
def fit_tokens_program(
    own,
    mean,
    tokens,
    mean_before,
    tokens_before,
    along,
    ratio,
    packed,
    num_tokens,
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
    BEFOREHAND: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
):
    """Write the fit of one head, of keys or values of one sample, and replace its samples."""
    head, pitch, column = tl.program_id(0), tl.num_programs(0) * WIDTH, tl.arange(0, COLUMNS)  # what is kept is dense
    inside, at, samples = column < WIDTH, head * WIDTH + column, tl.cdiv(num_tokens, stride)
    own, last, before = own + at[None, :], tokens + at[None, :], tokens_before + at[None, :]
    last_mean, mean_way = _mean_and_way(mean + at, mean_before + at, ratio, inside, COLUMNS, EXTRAPOLATES)
    step, used = tl.load(ratio).to(tl.float32), 0.0
    if BEFOREHAND:
        used = tl.load(along + head)
    held_mean, own_pitch = last_mean + used * mean_way, stride * token_stride
    old_pitch = pitch * stride if KEEPS_ALL else pitch
    old_old, old_moved, old_way, way_way, way_moved = _products_of_samples(
        own, last, before, step, samples, own_pitch, old_pitch, used, WIDTH, ROWS, COLUMNS, EXTRAPOLATES, KEEPS_ALL
    )
    now_mean = _mean_of_all(
        own, last, before, num_tokens, token_stride, pitch, WIDTH, ROWS, COLUMNS, KEEPS_ALL, EXTRAPOLATES, True
    )
    found = way_moved / (samples * WIDTH) / (way_way / (samples * WIDTH) + TINY)
    found = tl.minimum(tl.maximum(found, LEAST), MOST).to(packed.dtype.element_ty).to(tl.float32)
    if BEFOREHAND:
        tl.store(along + head, found)
    else:
        used = found
    square = old_old / samples
    scale = (old_moved - used * old_way) / samples / (square + RIDGE * (tl.sum(square, 0) / WIDTH) + TINY)
    shift = now_mean - last_mean - scale * held_mean - used * mean_way
    _store_fit(packed + head * (1 + 2 * WIDTH), used, scale, shift, column, WIDTH)
    _store_means(mean + at, mean_before + at, now_mean, last_mean, inside, EXTRAPOLATES)


@triton.jit
def sample_tokens_program(
    own,
    mean,
    tokens,
    mean_before,
    tokens_before,
    num_tokens,
    stride,
    token_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    CONTINUES: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
):
    """Replace the samples of one head, of keys or values of one sample."""
    head, pitch = tl.program_id(0), tl.num_programs(0) * WIDTH  # what is kept is contiguous
    lane, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    inside, at = column < WIDTH, head * WIDTH + column
    own, kept, before = own + at[None, :], tokens + at[None, :], tokens_before + at[None, :]
    wide = inside[None, :]
    if not KEEPS_ALL:
        samples = tl.cdiv(num_tokens, stride)
        for base in range(0, samples, ROWS):
            sample = (base + lane).to(tl.int64)
            found = (sample < samples) & wide
            now = tl.load(own + sample * stride * token_stride, mask=found, other=0.0)
            if HAS_BEFORE:
                last = now
                if CONTINUES:
                    last = tl.load(kept + sample * pitch, mask=found, other=0.0)
                    tl.debug_barrier()  # or another thread writes what this one reads (triton-lang/triton#10924)
                tl.store(before + sample * pitch, last, mask=found)
            tl.store(kept + sample * pitch, now, mask=found)
    now_mean = _mean_of_all(
        own, kept, before, num_tokens, token_stride, pitch, WIDTH, ROWS, COLUMNS, KEEPS_ALL, HAS_BEFORE, CONTINUES
    )
    if HAS_BEFORE:
        older = now_mean
        if CONTINUES:
            older = tl.load(mean + at, mask=inside, other=0.0)
        tl.store(mean_before + at, older, mask=inside)
    tl.store(mean + at, now_mean, mask=inside)
