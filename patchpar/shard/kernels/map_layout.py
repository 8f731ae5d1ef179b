"""Where the values of a map are in memory: channel by channel, or the channels of each pixel side by side."""

from functools import cache

from torch import Tensor


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of `x` [B, C, ...] are side by side in memory, and the map is dense."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def dense(x: Tensor) -> Tensor:
    """Return `x` [B, C, ...] itself if it is contiguous or channels_last, else a contiguous copy."""
    return x if x.is_contiguous() or is_channels_last(x) else x.contiguous()


def empty_with_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """Return an empty map in the format of `x` [B, C, ...], with `rows` along `dim`, counted from the end."""
    shape = list(x.shape)
    shape[dim] = rows
    if is_channels_last(x):
        return x.new_empty((shape[0], *shape[2:], shape[1])).movedim(-1, 1)
    return x.new_empty(shape)


@cache  # every launch asks
def power_of_2(least: int) -> int:
    """Return the smallest power of two that is at least `least`, as blocks of Triton programs have to be."""
    return 1 << (least - 1).bit_length()
