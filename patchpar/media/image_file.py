"""Reading of image files. The header is checked before decoding: a small file may decode to gigabytes."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from patchpar.errors import PlanError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SCALE = 16
"""The largest enlargement of both sides of an image."""
MOST_PIXELS = 80_000_000
"""Decoding takes about eight bytes for each pixel."""


def read_image_file(
    source: Path | IO[bytes], label: str, *, most_pixels: int = MOST_PIXELS, formats: tuple[str, ...] | None = None
) -> "Image":
    """Return the image in a file as RGB, with its EXIF orientation applied. `label`: the file's name in messages.

    `formats`: Pillow formats to accept, by default all. Raises PlanError for a missing or invalid file, for one of
    floating-point pixels; before decoding, for more than `most_pixels` pixels, and for a PostScript program.
    """
    return _read(source, label, lambda image: _in_eight_bits(image, label).convert("RGB"), most_pixels, formats)


def read_mask_file(path: Path, label: str) -> "Image":
    """Return the mask in a file as L, white where it is white. Raises PlanError as `read_image_file`.

    And for one with transparency: what a file has under it is not what one sees.
    """

    def converted(image: "Image") -> "Image":
        if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
            raise PlanError(f"{label} has transparent pixels: save the mask in black and white, without transparency")
        return _in_eight_bits(image, label).convert("L")

    return _read(path, label, converted)


def _read(
    source: Path | IO[bytes],
    label: str,
    convert: Callable[["Image"], "Image"],
    most_pixels: int = MOST_PIXELS,
    formats: tuple[str, ...] | None = None,
) -> "Image":
    from PIL import Image, ImageOps

    try:
        with Image.open(source, formats=formats) as image:
            check_pixels(*image.size, label, most_pixels)
            if image.format == "EPS":
                raise PlanError(f"{label} is a PostScript program, which Pillow has Ghostscript run: save it as PNG")
            found = convert(ImageOps.exif_transpose(image))
            found.info.pop("exif", None)  # it may be broken, which who turns the image once more would find
            return found
    except PlanError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, twice ours, is checked first
        raise PlanError(f"{label} has too many pixels: at most {most_pixels / 1e6:.0f} million are taken") from error
    except FileNotFoundError as error:
        raise PlanError(f"{label} cannot be read as an image: there is no such file") from error
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error) as error:  # of Pillow's readers
        why = f"use {', '.join(formats)}" if formats else str(error)
        raise PlanError(f"{label} cannot be read as an image: {why}") from error


def _in_eight_bits(image: "Image", label: str) -> "Image":
    """Return an image of 16-bit grey values with 8 bits, of which Pillow would make most white. Raises PlanError."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() >= 2**16:
        raise PlanError(f"{label} has pixels of another range than 8 or 16 bits: save it with 8 bits")
    return Image.fromarray((values >> 8).astype(np.uint8))


def check_enlargement(scale: float, strength: float, of_scale: str = "scale=", of_strength: str = "strength=") -> None:
    """Raise PlanError for values that `patchpar.upscale` does not take.

    `of_scale`, `of_strength`: what stands before the value in messages.
    """
    if not 1 < scale <= MAX_SCALE:
        raise PlanError(f"{of_scale}{scale:g}: it must be above 1 and at most {MAX_SCALE}")
    if not 0 < strength < 1:
        raise PlanError(
            f"{of_strength}{strength:g}: it must be above 0, which adds no noise, and below 1, which keeps nothing"
        )


def enlarged_size(width: int, height: int, scale: float, label: str) -> tuple[int, int]:
    """Return `width` and `height` times `scale`, in pixels. Raises PlanError for more pixels than an image may have."""
    size = (round(width * scale), round(height * scale))
    check_pixels(*size, label)
    return size


def check_pixels(width: int, height: int, label: str, most_pixels: int = MOST_PIXELS) -> None:
    """Raise PlanError for an image or a frame of more than `most_pixels` pixels."""
    if width * height > most_pixels:
        most = f"{most_pixels / 1e6:.0f} million"
        raise PlanError(f"{label} has {width} x {height} pixels: at most {most} are taken, so make it smaller")
