"""A picture out of a file. Its header is read before it is decoded: a small file may hold a picture of gigabytes."""

import struct
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING

from patchpar.errors import PlanError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 80_000_000
"""Decoding takes about eight bytes for each."""


def read_image_file(
    source: Path | IO[bytes], label: str, *, most_pixels: int = MOST_PIXELS, formats: tuple[str, ...] | None = None
) -> "Image":
    """The picture in a file, in RGB, upright. `label`: what the file is called where it was asked for.

    `formats`: those of Pillow's that are read, by default all. Raises PlanError for a file that is not there, is no
    picture, is broken, or has more than `most_pixels` pixels, which are not decoded then.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(source, formats=formats) as image:
            check_pixels(*image.size, label, most_pixels)
            return ImageOps.exif_transpose(image).convert("RGB")
    except PlanError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, twice ours, comes before anybody else's
        raise PlanError(f"{label} has too many pixels: at most {most_pixels / 1e6:.0f} million are taken") from error
    except FileNotFoundError as error:
        raise PlanError(f"{label} cannot be read as a picture: there is no such file") from error
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error) as error:  # as Pillow's readers raise
        why = f"use {', '.join(formats)}" if formats else str(error)
        raise PlanError(f"{label} cannot be read as a picture: {why}") from error


def check_pixels(width: int, height: int, label: str, most_pixels: int = MOST_PIXELS) -> None:
    """Raise PlanError for a picture or a frame of more than `most_pixels` pixels."""
    if width * height > most_pixels:
        most = f"{most_pixels / 1e6:.0f} million"
        raise PlanError(f"{label} has {width} x {height} pixels: at most {most} are taken, so make it smaller")
