"""Whether a pipeline can draw large pictures out of patches, told before it is called."""

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
"""Pipelines that tests draw large pictures with. Nobody else gets another method without asking for it."""


def is_position_independent(pipe: Any) -> bool:
    """Whether between the steps a pipeline does the same in every place of its latents, whatever is in the others.

    Those that tests draw with do; what another one does is not known.
    """
    return type(pipe).__name__ in TESTED


def why_native_only(pipe: Any) -> str:
    """Why nothing but plain generation is chosen for large pictures of this pipeline; empty where it can be led."""
    denoisers = list(denoisers_of(pipe).values())
    if type(pipe).__name__ not in TESTED or not denoisers:
        return f"{type(pipe).__name__} is not known to draw well out of patches"
    try:
        NativeSize.of(pipe, denoisers[0], None)
        refuse_thresholding(pipe.scheduler)
        kind_of(pipe.scheduler)
    except (PlanError, UnsupportedModel) as error:
        return str(error)
    return ""
