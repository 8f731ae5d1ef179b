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
    outs,
    lses,
    merged_out,
    merged_lse,
    queries,
    out_strides,
    lse_strides,
    merged_strides,
    merged_lse_strides,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge PARTS outputs of ROWS queries of one head; a query whose keys are all masked, everywhere, becomes 0.

    `outs` and `lses` are tuples of pointers; strides are of samples, heads and queries.
    """
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    valid = row < queries
    inside = valid[:, None] & (column < WIDTH)[None, :]
    at = (sample * out_strides[0] + head * out_strides[1] + row * out_strides[2])[:, None] + column[None, :]
    at_lse = sample * lse_strides[0] + head * lse_strides[1] + row * lse_strides[2]
    merged = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        merged, total, top = _add(merged, total, top, outs[part], lses[part], at, at_lse, inside, valid)
    seen = total > 0.0
    divided = merged / tl.where(seen, total, 1.0)[:, None]
    to = sample * merged_strides[0] + head * merged_strides[1] + row * merged_strides[2]
    tl.store(merged_out + to[:, None] + column[None, :], divided.to(merged_out.dtype.element_ty), mask=inside)
    to_lse = sample * merged_lse_strides[0] + head * merged_lse_strides[1] + row * merged_lse_strides[2]
    lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(merged_lse + to_lse, lse, mask=valid)
