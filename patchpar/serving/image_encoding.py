"""PIL images as PNG, JPEG or WebP."""

import base64
import io
from collections.abc import Mapping
from typing import Any

from patchpar.serving.image_request import OutputFormat

DEFAULT_COMPRESSION = 100
"""OpenAI's default: the best quality of JPEG and WebP."""
MOST_SIDE: Mapping[OutputFormat, int] = {"jpeg": 65500, "webp": 16383}
"""Pixels of the longest side that libjpeg and libwebp write."""


def encode_image(image: Any, output_format: OutputFormat, compression: int | None) -> str:
    """Return the base64 text of a PIL image. See `image_bytes`."""
    return base64.b64encode(image_bytes(image, output_format, compression)).decode()


def image_bytes(image: Any, output_format: OutputFormat, compression: int | None) -> bytes:
    """Return the file of a PIL image. `compression`: 0 to 100, the quality of JPEG and WebP; PNG is lossless."""
    file = io.BytesIO()
    options = {} if output_format == "png" else {"quality": DEFAULT_COMPRESSION if compression is None else compression}
    (image.convert("RGB") if output_format == "jpeg" else image).save(file, output_format.upper(), **options)
    return file.getvalue()
