"""Triton programs of `correct_tokens` and `extrapolate_tokens`."""

import triton
import triton.language as tl


@triton.jit
def correct_tokens_program(
    attended,
    newest,
    previous,
    fits,
    ratio,
    table,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EXTRAPOLATES: tl.constexpr,
    CORRECTS: tl.constexpr,
):
    """Correct ROWS tokens of one head of one rank."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    entry = table + tl.program_id(2) * 5
    rank, num_tokens = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    wide = column < WIDTH
    inside = (token < num_tokens) & wide
    size = heads.to(tl.int64) * WIDTH
    at = token.to(tl.int64) * size + head * WIDTH + column
    last = tl.load(newest + tl.load(entry + 3) * size + at, mask=inside, other=0.0)
    value = last.to(tl.float32)
    moved = value
    reach = tl.load(ratio).to(tl.float32)
    fit = fits + (rank * heads + head) * (1 + 2 * WIDTH)
    if CORRECTS:
        reach *= tl.load(fit).to(tl.float32)
    if EXTRAPOLATES:
        from_previous = previous + tl.load(entry + 4) * size + at
        before = tl.load(from_previous, mask=inside, other=0.0).to(tl.float32)
        tl.debug_barrier()  # Triton may let another thread write what this one reads (triton-lang/triton#10924)
        tl.store(from_previous, last, mask=inside)
        moved += reach * (value - before)
    if CORRECTS:
        moved += value * tl.load(fit + 1 + column, mask=wide, other=0.0).to(tl.float32)
        moved += tl.load(fit + 1 + WIDTH + column, mask=wide, other=0.0).to(tl.float32)
    tl.store(attended + tl.load(entry + 2) * size + at, moved.to(attended.dtype.element_ty), mask=inside)


@triton.jit
def extrapolate_tokens_program(
    into,
    newest,
    previous,
    along,
    ratio,
    num_tokens,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ALONG: tl.constexpr,
):
    """Extrapolate ROWS tokens of one head."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (token < num_tokens) & (column < WIDTH)
    at = token.to(tl.int64) * heads * WIDTH + head * WIDTH + column
    reach = tl.load(ratio).to(tl.float32)
    if HAS_ALONG:
        reach *= tl.load(along + head)
    last = tl.load(newest + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(previous + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + at, (last + reach * (last - before)).to(into.dtype.element_ty), mask=inside)
