"""Images and masks that come with a request: checked before they are decoded, and made to fit the call.

A job keeps files and not pixels while it waits: a file of kilobytes may be 120 MB of these.
"""

import asyncio
import io
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from patchpar.errors import PlanError
from patchpar.media.image_file import read_image_file
from patchpar.serving.request_error import RequestError

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 40_000_000
"""Of all images of a request together. A decoded image takes three bytes for each pixel."""
TRANSPARENT = 128
"""Alpha below which a pixel of a mask counts as transparent, which is where the image is painted anew."""
CHECKS = ThreadPoolExecutor(2, "patchpar-uploads")
"""Files are decoded to be checked, two requests at a time: each may take eight bytes for each of MAX_PIXELS."""
T = TypeVar("T")


async def checked_aside(check: Callable[..., T], *args: Any) -> T:
    """Return what a function returns that decodes uploads. The event loop goes on meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(CHECKS, check, *args)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedImage:
    """A file that has been decoded once, so that it can be again. `size`: width and height in pixels, upright.

    `is_mask`: it has one channel, else it has RGB.
    """

    data: bytes = field(repr=False)
    size: tuple[int, int]
    is_mask: bool = False

    @property
    def width(self) -> int:
        """Pixels of a row."""
        return self.size[0]

    @property
    def height(self) -> int:
        """Pixels of a column."""
        return self.size[1]

    def resized(self, size: tuple[int, int]) -> "UploadedImage":
        """Return the image that is decoded to another size, width and height."""
        return replace(self, size=size)

    def decoded(self) -> Any:
        """Return a new PIL image, RGB or the L of a mask."""
        image = read_image_file(io.BytesIO(self.data), "image", most_pixels=MAX_PIXELS, formats=FORMATS)
        return resized(image.convert("L") if self.is_mask else image, self.size, is_mask=self.is_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploads:
    """The files of a request: images, and a mask that is 255 where the image is painted anew."""

    images: tuple[UploadedImage, ...] = ()
    mask: UploadedImage | None = None


def check_upload(data: bytes, name: str, most: int = MAX_PIXELS) -> UploadedImage:
    """Return a file that is an image. Raises RequestError as `read_upload` does."""
    return UploadedImage(data=data, size=read_upload(data, name, most).size)


def read_upload(data: bytes, name: str, most: int = MAX_PIXELS) -> Any:
    """Return the PIL image of a file, in RGB and upright. Raises RequestError, before decoding for too many pixels.

    `most`: what other images of the request have left of MAX_PIXELS.
    """
    try:
        return read_image_file(io.BytesIO(data), name, most_pixels=most, formats=FORMATS)
    except PlanError as error:
        others = f" (all of a request have {MAX_PIXELS / 1e6:.0f} million at most)" if most < MAX_PIXELS else ""
        raise RequestError(f"{error}{others}", param=name, code="invalid_image") from None


def check_mask(data: bytes, name: str, size: tuple[int, int]) -> UploadedImage:
    """Return a mask that is 255 where the file is transparent. Raises RequestError, also for another size.

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
        mask = image.convert("RGBA").getchannel("A").point(lambda alpha: 255 if alpha < TRANSPARENT else 0)
    file = io.BytesIO()
    mask.save(file, "PNG", compress_level=1)
    return UploadedImage(data=file.getvalue(), size=size, is_mask=True)


def with_decoded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a call with PIL images instead of files."""
    return {name: _decoded(value) for name, value in arguments.items()}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    return value.decoded() if isinstance(value, UploadedImage) else value


def resized(image: Any, size: tuple[int, int], *, is_mask: bool = False) -> Any:
    """Return a PIL image of `size`, width and height."""
    from PIL import Image

    if image.size == size:
        return image
    return image.resize(size, Image.Resampling.NEAREST if is_mask else Image.Resampling.LANCZOS)
