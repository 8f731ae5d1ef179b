"""The number of patches and windows of an image size. No torch: computed before any rank works."""

import math
from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.models.info import PipelineInfo
from patchpar.plan.byte_sizes import readable_bytes

LARGE = 1.5  # times the native size, on both sides: from there on a denoiser repeats objects
COPIES = 12
"""Copies in fp32 of the latents of all guidance branches that a rank holds at most in a step."""


def scale_of(side: int, native: int) -> int:
    """Return the number of patches along a side, in latents, whose size is nearest to the native one, as a ratio.

    A patch is then between 0.71 and 1.41 times as large as the denoiser was trained for.
    """
    exact = side / native
    below = max(1, math.floor(exact))
    return below if exact / below <= (below + 1) / exact else below + 1


def starts_of(side: int, window: int, overlap: float, unit: int) -> list[int]:
    """Return evenly spaced starts of windows, the last at the end of the side. `overlap`: the least fraction."""
    stride = max(unit, round(window * (1 - overlap)) // unit * unit)
    room = side - window
    count = -(-room // stride)
    return [round(room * index / count / unit) * unit for index in range(count)] + [room] if room else [0]


def fewest_of(side: int, native: int, margin: float, unit: int, step: int) -> tuple[int, list[int]]:
    """Return size and starts of the fewest native-size windows that cover a side, enlarged by the fraction `margin`."""
    count = -(-side // native)
    window = min(side, -(-round(native * (1 + margin)) // step) * step)
    room = side - window
    if count == 1:
        return window, [0]
    return window, [round(room * index / (count - 1) / unit) * unit for index in range(count)]


def stride_of(size: tuple[int, int], tokens: int) -> int | None:
    """Return the latents per token along a side of a map of `size` with so many tokens, a power of two, or None."""
    strides = (2**power for power in range(max(size).bit_length()))
    return next((stride for stride in strides if math.prod(-(-side // stride) for side in size) == tokens), None)


def is_large(size: tuple[int, int], native: tuple[int, int]) -> bool:
    """Return whether an image is so much larger than the native size that it needs structure guidance."""
    return all(side >= LARGE * own for side, own in zip(size, native, strict=True))


def units_of(
    size: tuple[int, int], native: tuple[int, int], grid: int, *, overlap: float, margin: float | None
) -> tuple[int, int]:
    """Return (patches, windows) of a size in latents. `overlap`, `margin`: fractions of a window."""
    sides = list(zip(size, native, strict=True))
    patches = math.prod(scale_of(side, own) for side, own in sides)
    if margin is not None:
        return patches, math.prod(-(-side // own) for side, own in sides)
    return patches, math.prod(len(starts_of(side, min(side, own), overlap, grid)) for side, own in sides)


def check_teams(ranks: int, bands: int) -> None:
    """Raise PlanError unless `bands` divides the number of ranks. One rank alone has no teams."""
    if ranks > 1 and ranks % bands:
        raise PlanError(f"bands={bands}: axis 'patch' has {ranks} ranks, no multiple of it: use a divisor of {ranks}")


def refusal_of(size: tuple[int, int], native: tuple[int, int]) -> str:
    """Return the error message for an image, in pixels, that is too small for structure guidance."""
    return (
        f"{size[0]} x {size[1]} pixels are less than 1.42 times the native size of {native[0]} x {native[1]}: plain "
        "generation is right for it, so use strategy exact"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes: `latents` on each rank, `decoding` on all ranks together."""

    latents: int
    decoding: int

    @classmethod
    def of(cls, model: PipelineInfo, size: tuple[int, int], branches: int) -> "MemoryEstimate":
        """Return the estimate for an image of `size` (height, width) in pixels."""
        pixels, side = size[0] * size[1], model.vae_scale
        latents = COPIES * branches * model.latent_channels * (pixels // side**2) * 4
        return cls(latents=latents, decoding=pixels * model.decoded_bytes)

    def __str__(self) -> str:
        return f"{readable_bytes(self.latents)} of latents on each rank, {readable_bytes(self.decoding)} to decode them"


def check_room(model: PipelineInfo, size: tuple[int, int], branches: int, *, ranks: int, free: int | None) -> None:
    """Raise PlanError for an image whose latents on `ranks` ranks exceed the `free` bytes that the ranks share."""
    need = MemoryEstimate.of(model, size, branches).latents * ranks
    if free is None or need <= free:
        return
    unit, shrunk = model.size_unit, (free / need) ** 0.5
    height, width = (max(unit, int(side * shrunk) // unit * unit) for side in size)
    each = "rank" if ranks == 1 else "ranks"
    raise PlanError(
        f"{size[0]} x {size[1]} pixels need about {readable_bytes(need)} for their latents on {ranks} {each}, but only "
        f"{readable_bytes(free)} are free: ask for at most {height} x {width}"
    )
