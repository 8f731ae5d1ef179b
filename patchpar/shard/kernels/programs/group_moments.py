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


@triton.jit
def merge_parts_program(packed, merged, parts, total, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """Merge the moments of the parts of GROUPS groups (Chan, Golub, LeVeque 1979)."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    is_group = group < total
    part = tl.arange(0, PARTS)[:, None]
    row = packed + part * (1 + 2 * total)
    count = tl.load(row, mask=part < parts, other=0.0)
    inside = (part < parts) & is_group[None, :]
    means = tl.load(row + 1 + group[None, :], mask=inside, other=0.0)
    m2s = tl.load(row + 1 + total + group[None, :], mask=inside, other=0.0)
    num = tl.sum(count)
    mean = tl.sum(count * means, 0) / num
    apart = means - mean[None, :]
    tl.store(merged + 1 + group, mean, mask=is_group)
    tl.store(merged + 1 + total + group, tl.sum(m2s + count * apart * apart, 0), mask=is_group)
    if tl.program_id(0) == 0:
        tl.store(merged, num)
