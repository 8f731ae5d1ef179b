"""Whether a pipeline can generate large images from patches, known before it is called."""

from typing import Any

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.info import denoisers_of
from patchpar.strategies.structure.native_size import NativeSize
from patchpar.strategies.structure.noise_level import kind_of, refuse_thresholding

TESTED = (
    "StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline",
    "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline",
    "StableDiffusion3Pipeline", "FluxPipeline",
)  # fmt: skip
"""Pipelines whose large images are tested. For any other one structure guidance is never chosen automatically."""


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
