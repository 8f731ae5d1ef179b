"""Loading a reference image from a file, a PIL image or an array."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.files import path_of
from patchpar.models.image_file import read_image_file


def load_reference_image(reference: Any, height: int, width: int) -> Tensor:
    """Return [height, width, 3] in uint8, in pixels: images upright, cropped and scaled, arrays as they are.

    Raises PlanError.
    """
    if isinstance(reference, (str, Path)):
        path = path_of(reference)
        reference = read_image_file(path, f"the reference {path}")
    if isinstance(reference, Image.Image):
        upright = ImageOps.exif_transpose(reference).convert("RGB")
        reference = np.array(ImageOps.fit(upright, (width, height)))
    try:
        # A copy, since the caller may use its buffer again; in host memory, from which images go to the ranks.
        is_array = isinstance(reference, np.ndarray)
        image = torch.tensor(reference) if is_array else torch.as_tensor(reference).to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"a reference of {type(reference).__name__} is no image: {_accepted(height, width)}") from error
    if image.dtype is not torch.uint8 or tuple(image.shape) != (height, width, 3):
        raise PlanError(
            f"a reference of shape {tuple(image.shape)} in {image.dtype} does not fit: {_accepted(height, width)}"
        )
    return image


def _accepted(height: int, width: int) -> str:
    return f"give a file, a PIL image, or {(height, width, 3)} in uint8"
