"""How many patches and windows a size makes. Pure arithmetic, no torch: a caller asks before any rank works."""

import math


def scale_of(side: int, native: int) -> int:
    """How many patches along a side: the number that brings a patch nearest to its native size, as a ratio.

    Patches are so between 0.71 and 1.41 times as large as the denoiser was trained for.
    """
    exact = side / native
    below = max(1, math.floor(exact))
    return below if exact / below <= (below + 1) / exact else below + 1


def starts_of(side: int, window: int, overlap: float, unit: int) -> list[int]:
    """Where windows begin, evenly, the last one at the end. `overlap`: the least share of a window, in whole units."""
    stride = max(unit, round(window * (1 - overlap)) // unit * unit)
    room = side - window
    count = -(-room // stride)
    return [round(room * place / count / unit) * unit for place in range(count)] + [room] if room else [0]


def refusal_of(size: tuple[int, int], native: tuple[int, int]) -> str:
    """The message for a picture in pixels that is too small to gain from any of this."""
    return (
        f"{size[0]} x {size[1]} pixels are less than 1.42 times the native size of {native[0]} x {native[1]}: plain "
        "generation is right for it, so use strategy exact"
    )
