"""Reading of image files. The header is checked before decoding: a small file may decode to gigabytes."""

import struct
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING

from patchpar.errors import PlanError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 80_000_000
"""Decoding takes about eight bytes for each pixel."""


def read_image_file(
    source: Path | IO[bytes], label: str, *, most_pixels: int = MOST_PIXELS, formats: tuple[str, ...] | None = None
) -> "Image":
    """Return the image in a file as RGB, with its EXIF orientation applied. `label`: the file's name in messages.

    `formats`: Pillow formats to accept, by default all. Raises PlanError for a missing or invalid file, and, before
    decoding, for more than `most_pixels` pixels.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(source, formats=formats) as image:
            check_pixels(*image.size, label, most_pixels)
            return ImageOps.exif_transpose(image).convert("RGB")
    except PlanError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, twice ours, is checked first
        raise PlanError(f"{label} has too many pixels: at most {most_pixels / 1e6:.0f} million are taken") from error
    except FileNotFoundError as error:
        raise PlanError(f"{label} cannot be read as an image: there is no such file") from error
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error) as error:  # of Pillow's readers
        why = f"use {', '.join(formats)}" if formats else str(error)
        raise PlanError(f"{label} cannot be read as an image: {why}") from error


def check_pixels(width: int, height: int, label: str, most_pixels: int = MOST_PIXELS) -> None:
    """Raise PlanError for an image or a frame of more than `most_pixels` pixels."""
    if width * height > most_pixels:
        most = f"{most_pixels / 1e6:.0f} million"
        raise PlanError(f"{label} has {width} x {height} pixels: at most {most} are taken, so make it smaller")
