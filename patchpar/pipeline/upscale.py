"""A picture made larger: resized, given some noise, and drawn again from there.

    picture  --resized-->  encoded  --noise-->  windows, kept in place by the anchor  --decoded-->  larger picture

As in img2img (SDEdit, arXiv 2108.01073): the noise takes the fine detail away that resizing could not have, and the
model draws detail of its own. At a size that is large for the model, structure guidance keeps it to the picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchpar.errors import PlanError

if TYPE_CHECKING:
    from PIL.Image import Image

    from patchpar.pipeline.pipeline import ParallelPipeline

GRID = 64  # pixels: a multiple of what any model's sides must be multiples of


def upscale(
    pipe: ParallelPipeline, image: Image, *, scale: float = 2.0, strength: float = 0.35, **call: Any
) -> Image | None:
    """`image`, `scale` times as large on both sides, by a pipeline of task "image-to-image".

    `strength`: how much noise it is given, from 0 to 1: more of it, more new detail and less of the old. `call` goes to
    the pipeline: prompt, generator, num_inference_steps (of which it takes the last `strength`). None on a rank of
    torchrun that has no result. Raises PlanError.
    """
    _check(pipe, scale, strength)
    size = (round(image.width * scale), round(image.height * scale))
    resized = _continued(image.convert("RGB").resize(size, resample=3))
    output = pipe(**{"prompt": "", "image": resized, "strength": strength, **call})
    return None if output.images is None else output.images[0].crop((0, 0, *size))


def _check(pipe: ParallelPipeline, scale: float, strength: float) -> None:
    if not 1 < scale <= 16:
        raise PlanError(f"scale={scale:g}: a picture is made more than 1 and at most 16 times as large")
    if not 0 < strength < 1:
        raise PlanError(f"strength={strength:g}: it is between 0, which adds nothing, and 1, which leaves nothing")
    if not {"image", "strength"} <= set(pipe.description.parameters):
        raise PlanError(
            f"{pipe.description.pipeline} does not begin with a picture: open the model as "
            "ParallelPipeline.from_pretrained(model, task='image-to-image')"
        )


def _continued(image: Image) -> Image:
    """Right and bottom continued by their last pixels to a multiple of the grid."""
    import numpy as np
    from PIL.Image import fromarray

    more = [(0, -side % GRID) for side in (image.height, image.width)]
    return fromarray(np.pad(np.asarray(image), (*more, (0, 0)), mode="edge"))
