"""Images and masks that come with a request: checked before they are decoded, and made to fit the call."""

import io
from dataclasses import dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.image_file import read_image_file
from patchpar.serving.request_error import RequestError

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 40_000_000
"""Of all images of a request together. A decoded image takes three bytes for each pixel."""
TRANSPARENT = 128
"""Alpha below which a pixel of a mask counts as transparent, which is where the image is painted anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploads:
    """The files of a request: PIL images in RGB, and a mask in L that is 255 where the image is painted anew."""

    images: tuple[Any, ...] = ()
    mask: Any = None


def read_upload(data: bytes, name: str, most: int = MAX_PIXELS) -> Any:
    """Return the PIL image of a file, in RGB and upright. Raises RequestError, before decoding for too many pixels.

    `most`: what other images of the request have left of MAX_PIXELS.
    """
    try:
        return read_image_file(io.BytesIO(data), name, most_pixels=most, formats=FORMATS)
    except PlanError as error:
        others = f" (all of a request have {MAX_PIXELS / 1e6:.0f} million at most)" if most < MAX_PIXELS else ""
        raise RequestError(f"{error}{others}", param=name, code="invalid_image") from None


def read_mask(data: bytes, name: str, size: tuple[int, int]) -> Any:
    """Return a mask of PIL's mode L, 255 where the file is transparent. Raises RequestError, also for another size.

    `size`: width and height of the image.
    """
    from PIL import Image

    read_upload(data, name)  # refuses what is no image, or too large a one
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if "A" not in image.getbands() and "transparency" not in image.info:
            raise RequestError(
                f"{name} has no transparency: send a PNG that is transparent where the image is to be painted anew",
                param=name,
                code="invalid_image",
            )
        if image.size != size:
            raise RequestError(
                f"{name} has {image.width} x {image.height} pixels, the image {size[0]} x {size[1]}: make them equal",
                param=name,
                code="invalid_image",
            )
        return image.convert("RGBA").getchannel("A").point(lambda alpha: 255 if alpha < TRANSPARENT else 0)


def resized(image: Any, size: tuple[int, int], *, is_mask: bool = False) -> Any:
    """Return a PIL image of `size`, width and height."""
    from PIL import Image

    if image.size == size:
        return image
    return image.resize(size, Image.Resampling.NEAREST if is_mask else Image.Resampling.LANCZOS)
