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
