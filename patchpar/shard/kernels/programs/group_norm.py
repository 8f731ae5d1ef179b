"""Triton program of `group_norm`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["starts"])  # or it were compiled anew for each map
def group_norm_program(
    x,
    y,
    terms,
    moments,
    now,
    weight,
    bias,
    starts,
    ranks,
    groups,
    channels,
    width,
    size,
    stride_sample,
    stride_channel,
    stride_pixel,
    eps,
    least,
    UNBIASED: tl.constexpr,
    STARTS: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Merge the moments of `ranks` ranks for CHANNELS channels, correct them by `now`, normalise PIXELS pixels of each.

    The programs of the first pixels also write mean, scale and shift of their channels.
    """
    sample, total = tl.program_id(2), tl.num_programs(2) * groups
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    group = sample * groups + channel // width
    rank = tl.arange(0, RANKS)[:, None]
    row, own = _rows_of_ranks(moments, starts, rank, total, STARTS)
    mean, var = _mean_and_variance(row, own, now, group, is_channel, total, rank < ranks, least, UNBIASED)
    scale = 1.0 / tl.sqrt(var + eps)
    if weight is not None:
        scale *= tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    shift = tl.zeros_like(scale)
    if bias is not None:
        shift += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    if tl.program_id(0) == 0:
        _store_terms(terms + sample * channels + channel, mean, scale, shift, is_channel, channels)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    at = sample.to(tl.int64) * stride_sample
    at += channel.to(tl.int64)[:, None] * stride_channel + pixel.to(tl.int64)[None, :] * stride_pixel
    inside = is_channel[:, None] & (pixel < size)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (value - mean[:, None]) * scale[:, None] + shift[:, None], mask=inside)


@triton.jit
def _rows_of_ranks(moments, starts, rank, total, STARTS: tl.constexpr):
    """Return where the moments of each rank begin, and those of the first.

    At as many as STARTS elements of `moments`, or one after the other if that is 0.
    """
    first, row = moments, moments + rank * (1 + 2 * total)
    if STARTS:
        first, row = moments + starts[0], moments + tl.zeros_like(rank)
        for index in tl.static_range(STARTS):
            row += tl.where(rank == index, starts[index], 0)
    return row, first


@triton.jit
def _store_terms(into, mean, scale, shift, is_channel, channels):
    """Write the terms of channels."""
    maps = tl.num_programs(2) * channels
    tl.store(into, mean, mask=is_channel)
    tl.store(into + maps, scale, mask=is_channel)
    tl.store(into + 2 * maps, shift, mask=is_channel)


@triton.jit
def _mean_and_variance(row, own, now, group, is_channel, total, is_rank, least, UNBIASED: tl.constexpr):
    """Return those of the `group` of each channel: merged over ranks, and corrected from `own` to `now`, if given."""
    count = tl.load(row, mask=is_rank, other=0.0)
    is_value = is_rank & is_channel[None, :]
    means = tl.load(row + 1 + group[None, :], mask=is_value, other=0.0)
    m2s = tl.load(row + 1 + total + group[None, :], mask=is_value, other=0.0)
    num = tl.sum(count)
    mean = tl.sum(count * means, 0) / num
    apart = means - mean[None, :]
    var = tl.sum(m2s + count * apart * apart, 0) / num
    own_num = tl.load(own)
    if now is not None:
        own_mean = tl.load(own + 1 + group, mask=is_channel, other=0.0)
        own_var = tl.load(own + 1 + total + group, mask=is_channel, other=0.0) / own_num
        now_num = tl.load(now)
        moved = tl.load(now + 1 + group, mask=is_channel, other=0.0) - own_mean
        now_var = tl.load(now + 1 + total + group, mask=is_channel, other=0.0) / now_num
        corrected = var + (now_var - own_var) + 2 * moved * (own_mean - mean)
        var = tl.where(corrected < least * now_var, now_var, corrected)
        mean += moved
        own_num = now_num
    if UNBIASED:
        var *= own_num / tl.maximum(own_num - 1.0, 1.0)
    return mean, var
