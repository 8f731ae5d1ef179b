"""Triton program of `correct_matrices`."""

import triton
import triton.language as tl


@triton.jit
def correct_matrices_program(
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
):
    """Correct ROWS tokens of one head of one rank."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    entry = table + tl.program_id(2) * 5
    rank, num_tokens = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)
    inside = (token < num_tokens) & (column < WIDTH)[None, :]
    size = heads.to(tl.int64) * WIDTH
    at = token.to(tl.int64) * size + head * WIDTH + column[None, :]
    fit = fits + (rank * heads + head) * (1 + WIDTH * WIDTH + WIDTH)
    square = (column < WIDTH)[:, None] & (column < WIDTH)[None, :]
    matrix = tl.load(fit + 1 + column[:, None] * WIDTH + column[None, :], mask=square, other=0.0)
    last = tl.load(newest + tl.load(entry + 3) * size + at, mask=inside, other=0.0)
    value = last.to(tl.float32)
    moved = value + tl.dot(last, matrix.to(last.dtype), input_precision="ieee")
    if EXTRAPOLATES:
        reach = tl.load(ratio).to(tl.float32) * tl.load(fit).to(tl.float32)
        from_previous = previous + tl.load(entry + 4) * size + at
        before = tl.load(from_previous, mask=inside, other=0.0).to(tl.float32)
        tl.debug_barrier()  # Triton may let another thread write what this one reads (triton-lang/triton#10924)
        tl.store(from_previous, last, mask=inside)
        moved += reach * (value - before)
    moved += tl.load(fit + 1 + WIDTH * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(attended + tl.load(entry + 2) * size + at, moved.to(attended.dtype.element_ty), mask=inside)
