"""What may be uploaded: how large, of which kind. Checked by the page for convenience, and here for safety."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from patchpar import PlanError
from patchpar.stream.sound_file import read_sound

MOST_BYTES = 20 * 2**20
MOST_PICTURE_PIXELS = 40_000_000  # a decoded picture takes three bytes for each
MOST_SECONDS = 120.0
MOST_UNKNOWN_BYTES = 4 * 2**20  # of sound that does not tell its length, as what a browser records
RATE = 16000  # samples per second
PICTURES = ("PNG", "JPEG", "WEBP", "BMP")


def check_size(path: str | Path) -> None:
    """Raise PlanError for a file that is too large."""
    size = Path(path).stat().st_size
    if size > MOST_BYTES:
        raise PlanError(f"the file has {size / 2**20:.1f} MB: at most {MOST_BYTES / 2**20:.0f} MB are taken")


def picture_from(path: str | Path | None) -> Image.Image:
    """A picture that was uploaded, in RGB, upright. Its size is looked at before it is decoded. Raises PlanError."""
    if path is None:
        raise PlanError("there is no picture: choose one, or take one with the camera")
    check_size(path)
    try:
        with Image.open(path, formats=PICTURES) as picture:
            width, height = picture.size
            if width * height > MOST_PICTURE_PIXELS:
                most = MOST_PICTURE_PIXELS / 1e6
                raise PlanError(f"the picture has {width} x {height} pixels: at most {most:.0f} million are taken")
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise PlanError(f"the file is no picture that can be read: use {', '.join(PICTURES)}") from error


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
