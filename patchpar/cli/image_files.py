"""Image files: check the path before the run, and write complete files after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.cli.output_files import check_can_write, written_whole
from patchpar.errors import PlanError

if TYPE_CHECKING:
    from PIL.Image import Image

LARGE = 1024 * 1024  # pixels; compression of smaller images takes little time
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


def names_for(path: Path, count: int) -> list[Path]:
    """Return `out.png` for one image; `out-1.png`, `out-2.png` ... for several."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, count + 1)]


def check_writable(path: Path) -> None:
    """Raise PlanError if an image cannot be written to `path`. Call it before the run."""
    if path.suffix.lower() not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise PlanError(f"cannot write {path}: the suffix {path.suffix!r} names no image format; use one of {known}")
    check_can_write(path, "--output", "image.png")


def save(image: Image, path: Path) -> None:
    """Write a complete file or none. A large PNG is compressed less: a fifth of the time, for a sixth more bytes."""
    is_large = image.width * image.height > LARGE
    options: dict[str, Any] = {"compress_level": 1} if path.suffix.lower() == ".png" and is_large else {}
    with written_whole(path) as temporary:
        image.save(temporary, **options)
