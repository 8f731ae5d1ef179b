"""Triton program of `extrapolate_tokens`."""

import triton
import triton.language as tl


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
