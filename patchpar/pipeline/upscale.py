"""Upscale an image: resize it, add noise, and denoise it again.

    image  --resize-->  encode  --noise-->  windows, kept in place by the anchor  --decode-->  larger image

As in img2img (SDEdit, arXiv 2108.01073): the noise removes the fine detail that resizing cannot provide, and the model
generates new detail. At a size that is large for the model, plan="auto" means structure guidance here, which keeps the
new image close to the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchpar.errors import PlanError
from patchpar.media.image_file import check_enlargement, enlarged_size
from patchpar.pipeline.auto_plan import choose_for_upscale

if TYPE_CHECKING:
    from PIL.Image import Image

    from patchpar.pipeline.pipeline import ParallelPipeline

GRID = 64  # pixels: a multiple of every model's size unit


def upscale(
    pipe: ParallelPipeline, image: Image, *, scale: float = 2.0, strength: float = 0.35, **call: Any
) -> Image | None:
    """Return `image` enlarged by `scale` on both sides, by a pipeline of task "image-to-image".

    `strength`: amount of noise, between 0 and 1: more noise gives more new detail and keeps less of the old. `call`
    goes to the pipeline: prompt, generator, num_inference_steps (of which it takes the last fraction `strength`). None
    on ranks of torchrun other than 0. Raises PlanError.
    """
    _check(pipe, scale, strength)
    size = enlarged_size(image.width, image.height, scale, f"the image at scale={scale:g}")
    resized = _continued(image.convert("RGB").resize(size, resample=3))
    output = pipe._call(choose_for_upscale, (), {"prompt": "", "image": resized, "strength": strength, **call})
    return None if output.images is None else output.images[0].crop((0, 0, *size))


def _check(pipe: ParallelPipeline, scale: float, strength: float) -> None:
    check_enlargement(scale, strength)
    if not {"image", "strength"} <= set(pipe.description.parameters):
        raise PlanError(
            f"{pipe.description.pipeline} does not start from an image: load the model with "
            "ParallelPipeline.from_pretrained(model, task='image-to-image')"
        )


def _continued(image: Image) -> Image:
    """Pad right and bottom with the last pixels to a multiple of the grid."""
    import numpy as np
    from PIL.Image import fromarray

    more = [(0, -side % GRID) for side in (image.height, image.width)]
    return fromarray(np.pad(np.asarray(image), (*more, (0, 0)), mode="edge"))
