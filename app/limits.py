"""Limits of uploads: size and format. The page checks them for convenience, the server for safety."""

import base64
import binascii
from pathlib import Path
from typing import Any

from PIL.Image import Image

from patchpar import PlanError
from patchpar.media.audio_file import read_audio
from patchpar.media.image_file import read_image_file
from patchpar.media.media_file import open_media

MAX_BYTES = 20 * 2**20
MAX_IMAGE_PIXELS = 40_000_000  # a decoded image takes three bytes for each
MAX_SECONDS = 120.0
MAX_UNKNOWN_BYTES = 4 * 2**20  # of audio without a declared length, such as a browser's recording
RATE = 16000  # samples per second
GONE = "this file is no longer here: choose it again"
FILE = "the file"  # the server's path is not shown
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


def check_size(path: str | Path) -> None:
    """Raise PlanError for a file that is too large or was deleted, as uploads are after an hour."""
    try:
        size = Path(path).stat().st_size
    except FileNotFoundError as error:
        raise PlanError(GONE) from error
    check_bytes(size)


def check_bytes(size: int) -> None:
    """Raise PlanError for a file of more bytes than are taken."""
    if size > MAX_BYTES:
        raise PlanError(f"{FILE} has {size / 2**20:.1f} MB: at most {MAX_BYTES / 2**20:.0f} MB are taken")


def read_image(path: str | Path | None, most_pixels: int | None = None) -> Image:
    """An uploaded image in RGB, upright. The size is checked before decoding. Raises PlanError."""
    limit = MAX_IMAGE_PIXELS if most_pixels is None else most_pixels
    if path is None:
        raise PlanError("there is no image: choose one, or take one with the camera")
    check_size(path)
    return read_image_file(Path(path), FILE, most_pixels=limit, formats=IMAGE_FORMATS)


def bytes_of(url: str) -> bytes:
    """Contents of a `data:` URL, which some browsers send for camera images. Raises PlanError."""
    text = url.partition(",")[2]
    check_bytes(len(text) * 3 // 4)
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise PlanError("the camera's image is incomplete: try again") from error


def read_audio_file(path: str | Path | None) -> tuple[Any, int]:
    """(samples in -1..1, rate) of an audio file. Its length is checked before and while it is decoded.

    Raises PlanError.
    """
    if path is None:
        raise PlanError("there is no audio: record some, or choose a file")
    check_size(path)
    try:
        seconds = _seconds_of(path)
        if seconds is None and Path(path).stat().st_size > MAX_UNKNOWN_BYTES:
            raise PlanError("the audio file does not declare its length and is not short: save it in another format")
        if seconds is not None and seconds > MAX_SECONDS:
            raise PlanError(f"the audio has {seconds:.0f} s: at most {MAX_SECONDS:.0f} s are taken")
        found = read_audio(Path(path), RATE, most=MAX_SECONDS)
    except PlanError as error:  # the user knows the file's name, not the server's path
        raise PlanError(str(error).replace(str(path), Path(path).name)) from error
    return found.samples, found.rate


def _seconds_of(path: str | Path) -> float | None:
    """Length declared by the file; None without one, or if it is no audio."""
    import av

    try:
        with open_media(Path(path)) as container:
            return None if container.duration is None else container.duration / 1e6
    except av.FFmpegError:
        return None
