"""Images of each page as PNG files with their parameters, so that a page that is reloaded has them again.

    page A --add--> folder/A/00017.png, 00017.webp (its thumbnail)

What is kept is limited: images and bytes of a page, and pages. The folder goes with the server.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar import PatchparError, PlanError

from .image_parameters import read_parameters
from .requests import GenerateRequest

MAX_IMAGES = 40  # of a page; the oldest goes first
MAX_BYTES = 200 * 2**20  # of a page's images; a PNG file of 4096 x 4096 pixels has about 30 MB
MAX_PAGES = 16  # the least recently used goes first
THUMBNAIL = 160  # pixels of the longer side


@dataclass(frozen=True, slots=True)
class ImageHistory:
    """Images of all pages, in one folder."""

    folder: Path

    def add(self, owner: str, image: Any) -> None:
        """Keep a PIL image of a page with the parameters that `image_parameters.add_parameters` has added.

        Raises PatchparError where the disk takes no more.
        """
        page = self.folder / owner
        last = max((int(name) for name in self.names(owner)), default=0)
        path = page / f"{max(time.time_ns(), last + 1):020d}.png"  # the newest also after the clock was put back
        small = image.copy()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        try:
            page.mkdir(exist_ok=True)
            small.save(path.with_suffix(".webp"))
            image.save(path, pnginfo=_text_of(image))
        except OSError as error:
            for part in (path, path.with_suffix(".webp")):
                part.unlink(missing_ok=True)
            raise PatchparError(
                f"the image cannot be kept: {error.strerror or error}; free some space in the server's folder of "
                "temporary files, and generate it again"
            ) from error
        self._remove_old(page)

    def names(self, owner: str) -> list[str]:
        """Names of a page's images, the newest first."""
        return [path.stem for path in _newest_first(self.folder / owner)]

    def thumbnails(self, owner: str) -> list[Path]:
        """Files of a page's thumbnails, the newest first."""
        return [path.with_suffix(".webp") for path in _newest_first(self.folder / owner)]

    def path(self, owner: str, name: str) -> Path:
        """The file of an image of the page. Raises PlanError for one that is no longer there."""
        for path in _newest_first(self.folder / owner):
            if path.stem == name:
                return path
        raise PlanError(f"this image is no longer here: the last {MAX_IMAGES} of a page are kept")

    def request(self, owner: str, name: str) -> GenerateRequest:
        """The request that an image of the page was made by. Raises PlanError."""
        return read_parameters(self.path(owner, name))

    def _remove_old(self, page: Path) -> None:
        total = 0
        for number, path in enumerate(_newest_first(page)):
            total += path.stat().st_size
            if number >= MAX_IMAGES or (number and total > MAX_BYTES):
                path.unlink(missing_ok=True)
                path.with_suffix(".webp").unlink(missing_ok=True)
        pages = sorted(self.folder.iterdir(), key=lambda each: each.stat().st_mtime_ns, reverse=True)
        for old in pages[MAX_PAGES:]:
            shutil.rmtree(old, ignore_errors=True)


def _newest_first(page: Path) -> list[Path]:
    return sorted(page.glob("*.png"), reverse=True)


def _text_of(image: Any) -> Any:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for name, text in image.info.items():
        if isinstance(text, str):
            info.add_text(name, text)
    return info
