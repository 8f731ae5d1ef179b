"""The picture whose looks a stream keeps, from whatever a caller has: a file, a PIL picture, an array."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.image_file import read_picture


def reference_picture(reference: Any, height: int, width: int) -> Tensor:
    """As (height, width, 3) in uint8. Files and PIL pictures are turned upright, cut and scaled. Raises PlanError."""
    if isinstance(reference, (str, Path)):
        path = Path(reference).expanduser()
        reference = read_picture(path, f"the reference {path}")
    if isinstance(reference, Image.Image):
        upright = ImageOps.exif_transpose(reference).convert("RGB")
        reference = np.array(ImageOps.fit(upright, (width, height)))
    try:
        picture = torch.tensor(reference) if isinstance(reference, np.ndarray) else torch.as_tensor(reference)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"a reference of {type(reference).__name__} is no picture: {_ways(height, width)}") from error
    if picture.dtype is not torch.uint8 or tuple(picture.shape) != (height, width, 3):
        raise PlanError(
            f"a reference of shape {tuple(picture.shape)} in {picture.dtype} does not fit: {_ways(height, width)}"
        )
    return picture


def _ways(height: int, width: int) -> str:
    return f"give a file, a PIL picture, or {(height, width, 3)} in uint8"
