"""How many patches and windows a size makes. Pure arithmetic, no torch: a caller asks before any rank works."""

import math

from patchpar.errors import PlanError

LARGE = 1.5  # times the native size, on both sides: from there on a denoiser repeats itself


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
    return [round(room * group_rank / count / unit) * unit for group_rank in range(count)] + [room] if room else [0]


def fewest_of(side: int, native: int, margin: float, unit: int, step: int) -> tuple[int, list[int]]:
    """The fewest native-size windows that cover a side, each larger by `margin` of its size: their size and starts."""
    count = -(-side // native)
    window = min(side, -(-round(native * (1 + margin)) // step) * step)
    room = side - window
    return window, [
        round(room * group_rank / (count - 1) / unit) * unit for group_rank in range(count)
    ] if count > 1 else [0]


def is_large(size: tuple[int, int], native: tuple[int, int]) -> bool:
    """Whether a picture is so much larger than what a denoiser was trained for that it should be led."""
    return all(side >= LARGE * own for side, own in zip(size, native, strict=True))


def units_of(
    size: tuple[int, int], native: tuple[int, int], grid: int, *, overlap: float, margin: float | None
) -> tuple[int, int]:
    """How many patches and how many windows a size makes."""
    sides = list(zip(size, native, strict=True))
    patches = math.prod(scale_of(side, own) for side, own in sides)
    if margin is not None:
        return patches, math.prod(-(-side // own) for side, own in sides)
    return patches, math.prod(len(starts_of(side, min(side, own), overlap, grid)) for side, own in sides)


def check_teams(ranks: int, bands: int) -> None:
    """Raise PlanError unless teams of `bands` ranks are all ranks; one rank alone has none."""
    if ranks > 1 and ranks % bands:
        raise PlanError(f"bands={bands}: axis 'patch' has {ranks} ranks, which teams of {bands} do not share evenly")


def refusal_of(size: tuple[int, int], native: tuple[int, int]) -> str:
    """The message for a picture in pixels that is too small to gain from any of this."""
    return (
        f"{size[0]} x {size[1]} pixels are less than 1.42 times the native size of {native[0]} x {native[1]}: plain "
        "generation is right for it, so use strategy exact"
    )
