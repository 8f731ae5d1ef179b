"""Triton program of `concat_halo`."""

import triton
import triton.language as tl


@triton.jit
def concat_halo_program(
    x,
    before,
    after,
    terms,
    y,
    first_rows,
    last_rows,
    runs,
    runs_per_map,
    length,
    first,
    size,
    last,
    channels,
    maps,
    num_first,
    num_last,
    CHANNELS_LAST: tl.constexpr,
    SILU: tl.constexpr,
    RUNS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Write POSITIONS of RUNS of `y`, [runs, length], and edge rows of `x` to be sent.

    `first`, `size`, `last`, which make up `length`: values of rows before, of those of `x`, and after. `num_first` and
    `num_last`: values of a run that are sent. `runs_per_map`: of one channel, or of one sample where channels are last.
    `maps`: samples times channels.
    """
    blocks = tl.cdiv(length, POSITIONS)
    run = tl.program_id(0) // blocks * RUNS + tl.arange(0, RUNS)[:, None]
    position = tl.program_id(0) % blocks * POSITIONS + tl.arange(0, POSITIONS)[None, :]
    is_run, own = run < runs, position - first
    is_own = is_run & (own >= 0) & (own < size)
    value = tl.load(x + run.to(tl.int64) * size + own, mask=is_own, other=0.0)
    _copy_rows(first_rows, value, run, own, is_own, num_first, runs_per_map, channels, CHANNELS_LAST)
    _copy_rows(last_rows, value, run, own - (size - num_last), is_own, num_last, runs_per_map, channels, CHANNELS_LAST)
    if before is not None:
        is_before = is_run & (position < first)
        halo = _halo_rows(
            before, terms, run, position, is_before, first, runs_per_map, channels, maps, CHANNELS_LAST, SILU
        )
        value = tl.where(is_before, halo.to(value.dtype), value)
    if after is not None:
        is_after = is_run & (own >= size) & (own < size + last)
        halo = _halo_rows(
            after, terms, run, own - size, is_after, last, runs_per_map, channels, maps, CHANNELS_LAST, SILU
        )
        value = tl.where(is_after, halo.to(value.dtype), value)
    tl.store(y + run.to(tl.int64) * length + position, value, mask=is_run & (position < length))


@triton.jit
def _copy_rows(rows, value, run, position, mask, size, runs_per_map, channels, CHANNELS_LAST: tl.constexpr):
    """Write the values at positions 0 to `size` of each run to `rows`, a contiguous map."""
    at, _map = _address(run, position, size, runs_per_map, channels, CHANNELS_LAST)
    tl.store(rows + at, value, mask=mask & (position >= 0) & (position < size))


@triton.jit
def _address(run, position, size, runs_per_map, channels, CHANNELS_LAST: tl.constexpr):
    """Return where a position of a run is in a contiguous map of `size` values a run, and in which channel."""
    block = run // runs_per_map
    if CHANNELS_LAST:  # block: the sample
        pixels, channel = size // channels, position % channels
        map_of = block * channels + channel
        at = map_of.to(tl.int64) * (runs_per_map * pixels) + (run % runs_per_map) * pixels + position // channels
    else:
        map_of = block + position * 0
        at = run.to(tl.int64) * size + position
    return at, map_of


@triton.jit
def _halo_rows(
    rows,
    terms,
    run,
    position,
    mask,
    size,
    runs_per_map,
    channels,
    maps,
    CHANNELS_LAST: tl.constexpr,
    SILU: tl.constexpr,
):
    """Return values of `rows`, a contiguous map with `size` values in each run of `y`, normalised and activated.

    They are rounded to their dtype in between, as two layers would round.
    """
    at, map_of = _address(run, position, size, runs_per_map, channels, CHANNELS_LAST)
    found = tl.load(rows + at, mask=mask, other=0.0)
    if terms is not None:
        mean = tl.load(terms + map_of, mask=mask, other=0.0)
        scale = tl.load(terms + maps + map_of, mask=mask, other=0.0)
        shift = tl.load(terms + 2 * maps + map_of, mask=mask, other=0.0)
        found = ((found.to(tl.float32) - mean) * scale + shift).to(found.dtype)
    if SILU:
        wide = found.to(tl.float32)
        found = (wide / (1.0 + tl.exp(-wide))).to(found.dtype)
    return found
