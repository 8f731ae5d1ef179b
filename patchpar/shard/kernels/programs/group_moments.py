"""Triton program of `group_moments`."""

import triton
import triton.language as tl


@triton.jit
def group_moments_program(
    x,
    packed,
    groups,
    rows,
    rows_per_part,
    stride_sample,
    stride_group,
    stride_row,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the moments of one part of one group: `rows` of WIDTH values side by side, ROWS rows at a time.

    Each lane has a mean and a sum of squared deviations of its own (Welford 1962); they are merged at the end (Chan,
    Golub, LeVeque 1979).
    """
    index, part = tl.program_id(0), tl.program_id(1)
    start = x + (index // groups).to(tl.int64) * stride_sample + (index % groups).to(tl.int64) * stride_group
    first = part * rows_per_part
    end = tl.minimum(first + rows_per_part, rows)
    row_lane, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    m2 = tl.zeros([ROWS, COLUMNS], tl.float32)
    count = tl.zeros([ROWS, COLUMNS], tl.float32)
    for base in range(first, end, ROWS):
        row = base + row_lane
        inside = (row < end) & (column < WIDTH)
        value = tl.load(start + row.to(tl.int64) * stride_row + column, mask=inside, other=0.0).to(tl.float32)
        delta = tl.where(inside, value - mean, 0.0)
        mean += delta * (1.0 / ((base - first) // ROWS + 1))  # so many values has each lane that has one more
        m2 += delta * (value - mean)
        count += inside.to(tl.float32)
    num = tl.sum(count)
    mean_of_all = tl.sum(mean * count) / tl.maximum(num, 1.0)
    deviation = mean - mean_of_all
    m2_of_all = tl.sum(m2 + count * deviation * deviation)
    total = tl.num_programs(0)
    out = packed + part * (1 + 2 * total)
    tl.store(out + 1 + index, mean_of_all)
    tl.store(out + 1 + total + index, m2_of_all)
    if index == 0:
        tl.store(out, num)
