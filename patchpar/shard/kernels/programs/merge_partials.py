"""Triton program of `merge_attention`."""

import triton
import triton.language as tl


@triton.jit
def _add(merged, total, top, out, lse, at, at_lse, inside, valid):
    """Add one part to the sum of outputs, weighted by exp(log-sum-exp - top), and to the sum of weights."""
    new = tl.load(lse + at_lse, mask=valid, other=float("-inf")).to(tl.float32)
    value = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.maximum(top, new)
    keep = tl.where(top == float("-inf"), 0.0, tl.exp(top - high))
    weight = tl.where(new == float("-inf"), 0.0, tl.exp(new - high))
    return merged * keep[:, None] + value * weight[:, None], total * keep + weight, high


@triton.jit
def merge_program(
    out_0,
    out_1,
    out_2,
    out_3,
    out_4,
    out_5,
    out_6,
    out_7,
    lse_0,
    lse_1,
    lse_2,
    lse_3,
    lse_4,
    lse_5,
    lse_6,
    lse_7,
    merged_out,
    merged_lse,
    queries,
    stride_b,
    stride_n,
    stride_l,
    stride_lse_b,
    stride_lse_n,
    stride_lse_l,
    stride_merged_b,
    stride_merged_n,
    stride_merged_l,
    stride_merged_lse_b,
    stride_merged_lse_n,
    stride_merged_lse_l,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge PARTS outputs of ROWS queries of one head; a query whose keys are all masked, everywhere, becomes 0."""
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    valid = row < queries
    inside = valid[:, None] & (column < WIDTH)[None, :]
    at = (sample * stride_b + head * stride_n + row * stride_l)[:, None] + column[None, :]
    at_lse = sample * stride_lse_b + head * stride_lse_n + row * stride_lse_l
    merged = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    merged, total, top = _add(merged, total, top, out_0, lse_0, at, at_lse, inside, valid)
    if PARTS > 1:
        merged, total, top = _add(merged, total, top, out_1, lse_1, at, at_lse, inside, valid)
    if PARTS > 2:
        merged, total, top = _add(merged, total, top, out_2, lse_2, at, at_lse, inside, valid)
    if PARTS > 3:
        merged, total, top = _add(merged, total, top, out_3, lse_3, at, at_lse, inside, valid)
    if PARTS > 4:
        merged, total, top = _add(merged, total, top, out_4, lse_4, at, at_lse, inside, valid)
    if PARTS > 5:
        merged, total, top = _add(merged, total, top, out_5, lse_5, at, at_lse, inside, valid)
    if PARTS > 6:
        merged, total, top = _add(merged, total, top, out_6, lse_6, at, at_lse, inside, valid)
    if PARTS > 7:
        merged, total, top = _add(merged, total, top, out_7, lse_7, at, at_lse, inside, valid)
    seen = total > 0.0
    divided = merged / tl.where(seen, total, 1.0)[:, None]
    to = (sample * stride_merged_b + head * stride_merged_n + row * stride_merged_l)[:, None] + column[None, :]
    tl.store(merged_out + to, divided.to(merged_out.dtype.element_ty), mask=inside)
    to_lse = sample * stride_merged_lse_b + head * stride_merged_lse_n + row * stride_merged_lse_l
    lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(merged_lse + to_lse, lse, mask=valid)
