"""Image-to-image and inpainting: an image generated anew, all of it or the part that is painted over."""

from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageFilter

from patchpar import PlanError
from patchpar.media.image_file import check_pixels

from .fields import UNIT
from .image_runner import ImageJobRunner, JobImage
from .job_queue import Job
from .limits import FILE, MAX_IMAGE_PIXELS
from .requests import MAX_PIXELS, MIN_SIDE, GenerateRequest, as_whole, check_whole

MAX_SIDE = 4096  # pixels
BLUR = 3  # pixels: the border between what stays and what is generated is that soft


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEdit:
    """An image to begin with, and where it is generated anew: PIL images of one size, RGB and L; no mask is all of it.

    `strength`: as of diffusers' image-to-image pipelines. `generate` has the size of the image. Raises PlanError.
    """

    image: Any
    generate: GenerateRequest
    mask: Any = None
    strength: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.strength <= 1:
            raise PlanError(f"strength {self.strength:g}: it is a number above 0 and at most 1")
        self.generate.check_strength(self.strength)

    @classmethod
    def of(cls, painted: Any, side: Any, strength: Any, **fields: Any) -> "ImageEdit":
        """From what Gradio's editor has, an image in layers. `side`: pixels of the longer side. Raises PlanError."""
        background = (painted or {}).get("background")
        if background is None:
            raise PlanError("there is no image: choose one, and paint over what is to be generated anew")
        side = as_whole(side)
        check_whole("longer side", side, MIN_SIDE, MAX_SIDE)
        size = size_of(background, side)
        mask = mask_of(painted.get("layers") or [], size)
        request = GenerateRequest.of(width=size[0], height=size[1], **fields)
        return cls(image=on_white(background).resize(size), mask=mask, generate=request, strength=float(strength or 0))


def on_white(image: Any) -> Any:
    """A PIL image in RGB, white where it is transparent: there the editor hands over black, which nobody sees."""
    opaque = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque).convert("RGB")


def size_of(image: Any, side: int) -> tuple[int, int]:
    """Width and height in pixels with this longer side, in the image's ratio, as multiples of what models take."""
    own_width, own_height = image.size
    check_pixels(own_width, own_height, FILE, MAX_IMAGE_PIXELS)
    scale = side / max(own_width, own_height)
    width, height = (max(UNIT, round(each * scale / UNIT) * UNIT) for each in (own_width, own_height))
    if width * height > MAX_PIXELS:
        raise PlanError(f"{width} x {height} pixels: at most {MAX_PIXELS} in all, so use a shorter side")
    return width, height


def mask_of(layers: list[Any], size: tuple[int, int]) -> Any:
    """What is painted in any layer, as a mask of this size: white where the image is generated anew. None: nothing."""
    mask = Image.new("L", size, 0)
    for layer in layers:
        painted = layer.convert("RGBA").getchannel("A").point(lambda alpha: 255 if alpha else 0).resize(size)
        mask.paste(255, mask=painted)
    return mask if mask.getbbox() else None


def edit(runner: ImageJobRunner, job: Job, request: ImageEdit) -> JobImage:
    """Generate; pixels that are not painted over stay as they are. Raises what `ImageJobRunner.edit` raises."""
    found = runner.edit(job, request.generate, request.image, mask=request.mask, strength=request.strength)
    if request.mask is not None:
        soft = request.mask.filter(ImageFilter.GaussianBlur(BLUR))
        soft.paste(0, mask=request.mask.point(lambda value: 255 - value))
        image = Image.composite(found.image.resize(request.image.size), request.image, soft)
        return JobImage(image=image, run=found.run, why=found.why, unknown=found.unknown)
    return found
