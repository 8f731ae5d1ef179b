"""What may be uploaded: how large, of which kind. Checked by the page for convenience, and here for safety."""

import base64
import binascii
from pathlib import Path
from typing import Any

from PIL.Image import Image

from patchpar import PlanError
from patchpar.models.image_file import read_picture
from patchpar.stream.audio.audio_file import read_sound

MOST_BYTES = 20 * 2**20
MOST_PICTURE_PIXELS = 40_000_000  # a decoded picture takes three bytes for each
MOST_SECONDS = 120.0
MOST_UNKNOWN_BYTES = 4 * 2**20  # of sound that does not tell its length, as what a browser records
RATE = 16000  # samples per second
GONE = "this file is no longer here: choose it again"
FILE = "the file"  # where it lies here is no news to the person
PICTURES = ("PNG", "JPEG", "WEBP", "BMP")


def check_size(path: str | Path) -> None:
    """Raise PlanError for a file that is too large, or that is gone: uploads are deleted after an hour."""
    try:
        size = Path(path).stat().st_size
    except FileNotFoundError as error:
        raise PlanError(GONE) from error
    _check_bytes(size)


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise PlanError(f"the file has {size / 2**20:.1f} MB: at most {MOST_BYTES / 2**20:.0f} MB are taken")


def picture_from(path: str | Path | None, most_pixels: int | None = None) -> Image:
    """A picture that was uploaded, in RGB, upright. Its size is looked at before it is decoded. Raises PlanError."""
    most = MOST_PICTURE_PIXELS if most_pixels is None else most_pixels
    if path is None:
        raise PlanError("there is no picture: choose one, or take one with the camera")
    check_size(path)
    return read_picture(Path(path), FILE, most_pixels=most, formats=PICTURES)


def bytes_of(url: str) -> bytes:
    """What a `data:` URL holds, as which pictures of a camera may come. Raises PlanError."""
    text = url.partition(",")[2]
    _check_bytes(len(text) * 3 // 4)
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise PlanError("the camera's picture did not arrive whole: try again") from error


def sound_from(path: str | Path | None) -> tuple[Any, int]:
    """(samples between -1 and 1, rate) of a sound file, whose length is looked at first. Raises PlanError."""
    if path is None:
        raise PlanError("there is no sound: record some, or choose a file")
    check_size(path)
    try:
        seconds = _seconds_of(path)
        if seconds is None and Path(path).stat().st_size > MOST_UNKNOWN_BYTES:
            raise PlanError("the sound does not say how long it is, and is not short: save it in another format")
        if seconds is not None and seconds > MOST_SECONDS:
            raise PlanError(f"the sound has {seconds:.0f} s: at most {MOST_SECONDS:.0f} s are taken")
        found = read_sound(Path(path), RATE)
    except PlanError as error:  # the person knows a file by its name, not by where it lies here
        raise PlanError(str(error).replace(str(path), Path(path).name)) from error
    return found.samples, found.rate


def _seconds_of(path: str | Path) -> float | None:
    """As the file itself says; None where it does not, or is no sound at all."""
    import av

    try:
        with av.open(str(path)) as container:
            return None if container.duration is None else container.duration / 1e6
    except av.FFmpegError:
        return None
