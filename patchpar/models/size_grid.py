"""The grid of height and width, as far as a model's folder shows it: neither torch nor diffusers is imported."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.model_index import ModelIndex
from patchpar.models.split_facts import UNET
from patchpar.plan.json_files import read_object
from patchpar.plan.scalars import is_whole

LEAST_UNIT, COMMON_UNIT = 8, 64
"""Pixels: every model's unit is a multiple of the first, and the second a multiple of every model's unit."""
VAE = "AutoencoderKL"


def check_side(name: str, value: Any, unit: int, *, offered: int = 0) -> None:
    """Raise PlanError for a side that is no whole number of pixels, or no multiple of `unit`.

    `offered`: the message names multiples of this; 0 for `unit`.
    """
    if not is_whole(value):
        raise PlanError(f"{name}={value!r}: it must be a whole number of pixels, at least {unit}")
    if value % unit:
        step = offered or unit
        below, above = value // step * step, -(-value // step) * step
        nearest = f"{below} or {above}" if below else f"{above}"
        raise PlanError(f"{name}={value} is no multiple of {unit}, the model's grid: use {nearest}")


def check_sides(folder: Path | None, *, height: int | None, width: int | None) -> None:
    """Raise PlanError for sides that no call of the model takes, as its folder shows; None: one that is not here yet.

    The loaded model shows the rest: some pipelines pack latents, which is in their code only.
    """
    unit, offered = grid_of(folder)
    for name, value in (("height", height), ("width", width)):
        if value is not None:
            check_side(name, value, unit, offered=offered)


def grid_of(folder: Path | None) -> tuple[int, int]:
    """Return a unit in pixels of which the model's is a multiple, and a multiple of that: the same where it is known.

    Of latent diffusion it is what the VAE makes smaller, times the patches of a transformer.
    """
    with suppress(PlanError, LookupError, TypeError):  # what is wrong with a file is said when it is loaded
        kinds = {} if folder is None else {part.name: part.kind for part in ModelIndex.read(folder).parts}
        if folder is not None and kinds.get("vae") == VAE:
            scale = 2 ** (len(read_object(folder / "vae" / "config.json")["block_out_channels"]) - 1)
            if kinds.get("unet") == UNET:
                return (max(LEAST_UNIT, scale),) * 2
            if "transformer" in kinds:
                patch = read_object(folder / "transformer" / "config.json").get("patch_size") or 1
                return max(LEAST_UNIT, scale * (patch if isinstance(patch, int) else patch[-1])), COMMON_UNIT
    return LEAST_UNIT, COMMON_UNIT
