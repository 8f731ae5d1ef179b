"""What may be uploaded: how large, of which kind. Checked by the page for convenience, and here for safety."""

from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from patchpar import PlanError

MOST_BYTES = 20 * 2**20
MOST_PICTURE_PIXELS = 40_000_000  # a decoded picture takes three bytes for each
MOST_SECONDS = 120.0
PICTURES = ("PNG", "JPEG", "WEBP", "BMP")


def check_size(path: str | Path) -> None:
    """Raise PlanError for a file that is too large."""
    size = Path(path).stat().st_size
    if size > MOST_BYTES:
        raise PlanError(f"the file has {size / 2**20:.1f} MB: at most {MOST_BYTES / 2**20:.0f} MB are taken")


def picture_from(path: str | Path | None) -> Image.Image:
    """A picture that was uploaded, in RGB. Its size is looked at before it is decoded. Raises PlanError."""
    if path is None:
        raise PlanError("there is no picture: choose one, or take one with the camera")
    check_size(path)
    try:
        with Image.open(path, formats=PICTURES) as picture:
            width, height = picture.size
            if width * height > MOST_PICTURE_PIXELS:
                most = MOST_PICTURE_PIXELS / 1e6
                raise PlanError(f"the picture has {width} x {height} pixels: at most {most:.0f} million are taken")
            return picture.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise PlanError(f"the file is no picture that can be read: use {', '.join(PICTURES)}") from error


def sound_from(recorded: tuple[int, Any] | None) -> tuple[Any, int]:
    """(samples between -1 and 1, rate) of sound as the page hands it over. Raises PlanError."""
    import numpy as np

    if recorded is None:
        raise PlanError("there is no sound: record some, or choose a file")
    rate, samples = recorded
    values = np.asarray(samples)
    if len(values) > MOST_SECONDS * rate:
        raise PlanError(f"the sound has {len(values) / rate:.0f} s: at most {MOST_SECONDS:.0f} s are taken")
    if not len(values):
        raise PlanError("the sound is empty: record some, or choose another file")
    scale = float(np.iinfo(values.dtype).max) if np.issubdtype(values.dtype, np.integer) else 1.0
    floats = values.astype(np.float32) / scale
    return (floats.mean(axis=1) if floats.ndim == 2 else floats), rate
