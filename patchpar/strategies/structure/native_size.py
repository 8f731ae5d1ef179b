"""The size in latents that a denoiser was trained for, and the grid that sizes must keep to."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.info import denoisers_of, describe
from patchpar.strategies.structure.noise_level import kind_of, refuse_thresholding
from patchpar.strategies.structure.sizing import refusal_of

TESTED = (
    "StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline",
    "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline",
    "StableDiffusion3Pipeline", "FluxPipeline",
)  # fmt: skip
"""Pipelines whose large images are tested. For any other one structure guidance is never chosen automatically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSize:
    """`size` (h, w) in latents of `pixels` x `pixels` pixels; sides are multiples of `unit`, corners of `grid`."""

    size: tuple[int, int]
    channels: int
    pixels: int
    unit: int
    grid: int

    @classmethod
    def of(cls, pipe: Any, denoiser: nn.Module, side: int | None) -> "NativeSize":
        """Return the configured size, or that of a `side` in pixels. Raises PlanError without either."""
        known = describe(pipe)
        pixels, grid = known.vae_scale, known.size_unit // known.vae_scale
        whole = (side, side) if side is not None else known.default_size
        if whole is None:
            raise PlanError(
                f"the configuration of {type(denoiser).__name__} does not give the size it was trained for: "
                "pass it, as in StructureGuidance(native=1024)"
            )
        if getattr(pipe, "scheduler", None) is None:
            raise UnsupportedModel(f"{known.pipeline} has no scheduler that gives the noise level of a timestep")
        unit = max(grid, known.total_stride)
        size = _on_grid(whole, pixels, unit)
        return cls(size=size, channels=known.latent_channels, pixels=pixels, unit=unit, grid=grid)

    def too_small(self, size: tuple[int, int]) -> str:
        """Return the error message for an image that is not large enough."""
        (height, width), (own_height, own_width) = size, self.size
        pixels = self.pixels
        return refusal_of((height * pixels, width * pixels), (own_height * pixels, own_width * pixels))


def _on_grid(whole: tuple[int, int], pixels: int, unit: int) -> tuple[int, int]:
    """Return pixels as latents, rounded down to a multiple of `unit`."""
    height, width = (max(unit, side // pixels // unit * unit) for side in whole)
    return height, width


def is_position_independent(pipe: Any) -> bool:
    """Return whether a pipeline is known to treat each position of its latents independently between the steps."""
    return type(pipe).__name__ in TESTED


def why_native_only(pipe: Any) -> str:
    """Return why large images of this pipeline get plain generation; empty if structure guidance supports it."""
    denoisers = list(denoisers_of(pipe).values())
    if type(pipe).__name__ not in TESTED or not denoisers:
        return f"{type(pipe).__name__} is not tested with structure guidance"
    try:
        NativeSize.of(pipe, denoisers[0], None)
        refuse_thresholding(pipe.scheduler)
        kind_of(pipe.scheduler)
    except (PlanError, UnsupportedModel) as error:
        return str(error)
    return ""
