"""Triton program of `write_tokens`."""

import triton
import triton.language as tl


@triton.jit
def write_tokens_program(
    attended,
    message,
    key,
    value,
    tokens,
    start,
    common,
    common_start,
    batch,
    heads,
    key_stride_sample,
    key_stride_token,
    key_stride_head,
    value_stride_sample,
    value_stride_token,
    value_stride_head,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_MESSAGE: tl.constexpr,
):
    """Copy ROWS tokens of one head of the keys or of the values of one sample."""
    group = tl.program_id(1)
    per_part = batch * heads
    is_value = group // per_part
    sample, head = (group % per_part) // heads, group % heads
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    in_width = column < WIDTH
    inside = (token < tokens) & in_width
    of_key, of_value = tokens * (1 - is_value), tokens * is_value  # tokens to read: all of one, none of the other
    at = token.to(tl.int64)
    from_key = key + sample.to(tl.int64) * key_stride_sample + head.to(tl.int64) * key_stride_head
    from_value = value + sample.to(tl.int64) * value_stride_sample + head.to(tl.int64) * value_stride_head
    x_key = tl.load(from_key + at * key_stride_token + column, mask=(token < of_key) & in_width, other=0.0)
    x_value = tl.load(from_value + at * value_stride_token + column, mask=(token < of_value) & in_width, other=0.0)
    x = tl.where(is_value == 1, x_value, x_key)
    lane = group.to(tl.int64) * WIDTH + column
    token_size = (2 * per_part * WIDTH).to(tl.int64)
    own = at - common
    into = tl.where(token < common, common_start + at, start + own)
    tl.store(attended + into * token_size + lane, x, mask=inside)
    if HAS_MESSAGE:
        tl.store(message + own * token_size + lane, x, mask=inside & (token >= common))
