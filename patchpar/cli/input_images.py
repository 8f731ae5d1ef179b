"""Images that a call begins with: `--image`, `--mask` and `--strength`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.cli.flag_values import check_strength
from patchpar.errors import PlanError
from patchpar.media.image_file import read_image_file, read_mask_file

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = ("height", "width")


def check_file(path: Path, label: str) -> None:
    """Raise PlanError unless `path` is a file that can be read more than once. `label`: its name in the message."""
    from patchpar.models.files import path_of

    found = path_of(path)
    if not found.exists():
        raise PlanError(f"{label}: there is no such file")
    if not found.is_file():
        raise PlanError(f"{label}: it is {'a folder' if found.is_dir() else 'a pipe or a device'}; name a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputImages:
    """The image to begin with and its mask, both of one size in pixels; None where there is none."""

    image: "Image | None" = None
    mask: "Image | None" = None
    strength: float | None = None

    @staticmethod
    def check(*, image: Path | None, mask: Path | None, strength: float | None) -> None:
        """Raise PlanError for a missing file, a strength outside 0..1, and for either without an image."""
        for flag, path in (("--image", image), ("--mask", mask)):
            if path is not None:
                check_file(path, f"{flag} {path}")
        if image is None and mask is not None:
            raise PlanError("--mask says which part of an image is generated anew: add --image FILE")
        if image is None and strength is not None:
            raise PlanError("--strength says how much of an image is changed: add --image FILE")
        check_strength(strength)

    @classmethod
    def read(
        cls, *, image: Path | None, mask: Path | None, strength: float | None, width: int | None, height: int | None
    ) -> "InputImages":
        """Return the images of these files, resized where a size is given. Raises PlanError for a bad file."""
        if image is None:
            return cls()
        found = read_image_file(image, f"--image {image}")
        size = (width or found.width, height or found.height)
        masking = None if mask is None else read_mask_file(mask, f"--mask {mask}").resize(size)
        return cls(image=found if found.size == size else found.resize(size), mask=masking, strength=strength)

    def arguments(self, call: Mapping[str, Any], takes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a `call` with the images. `takes`: the parameters of the call; empty if not known.

        A call that takes no size has that of its image, and so has one with a mask, which would resize both otherwise.
        """
        if self.image is None:
            return dict(call)
        sized = {name: value for name, value in call.items() if name not in SIZE or not takes or name in takes}
        if self.mask is not None and "height" in takes:
            sized = {"height": self.image.height, "width": self.image.width, **sized}
        more = {"image": self.image, "mask_image": self.mask, "strength": self.strength}
        return {**sized, **{name: value for name, value in more.items() if value is not None}}
