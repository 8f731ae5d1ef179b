"""Triton program of `sample_tokens`."""

import triton
import triton.language as tl

from patchpar.shard.kernels.programs.fit_tokens import _mean_of_all


@triton.jit
def sample_tokens_program(
    own,
    mean,
    tokens,
    mean_before,
    tokens_before,
    message,
    num_tokens,
    samples,
    stride,
    token_stride,
    last_pitch,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    CONTINUES: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Replace the samples of one head, of keys or values of one sample."""
    head, pitch = tl.program_id(0), tl.num_programs(0) * WIDTH  # samples of the step before and messages are contiguous
    lane, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    inside, at = column < WIDTH, head * WIDTH + column
    own, tokens, tokens_before = own + at[None, :], tokens + at[None, :], tokens_before + at[None, :]
    message += at[None, :]
    wide = inside[None, :]
    for base in range(0, samples, ROWS):
        sample = (base + lane).to(tl.int64)
        found = (sample < samples) & wide
        now = tl.load(own + sample * stride * token_stride, mask=found, other=0.0)
        if HAS_BEFORE:
            last = now
            if CONTINUES:
                last = tl.load(tokens + sample * last_pitch, mask=found, other=0.0)
            tl.store(tokens_before + sample * pitch, last, mask=found)
        tl.store(tokens + sample * last_pitch, now, mask=found)
    if COPIES:
        tl.debug_barrier()  # every thread has read its samples, which may be in the message
    now_mean = _mean_of_all(own, message, num_tokens, token_stride, pitch, lane, wide, ROWS, COLUMNS, COPIES)
    if HAS_BEFORE:
        older = now_mean
        if CONTINUES:
            older = tl.load(mean + at, mask=inside, other=0.0)
        tl.store(mean_before + at, older, mask=inside)
    tl.store(mean + at, now_mean, mask=inside)
