"""Arguments of the pipeline for the images of a request, as files: by what its call takes, without a list of models.

strength            image-to-image and inpainting: the result has the size of the image, or the image that of `size`
image alone         models that edit: the image is a reference, and the result has the size that they choose
mask_image          inpainting: the mask is needed
"""

from collections.abc import Mapping
from typing import Any

from patchpar.models.info import PipelineInfo
from patchpar.serving.request_error import RequestError
from patchpar.serving.uploaded_image import Uploads

MIN_SIDE = 64


def with_uploads(model: PipelineInfo, sides: Mapping[str, int], uploads: Uploads) -> dict[str, Any]:
    """Return the arguments for images and sides. Raises RequestError for files that the model does not take.

    `sides`: height and width in pixels, as far as the request gives them.
    """
    known = model.parameters
    if "image" not in known:
        raise _unsupported("image", f"this model, a {model.pipeline}, takes no image: leave it out")
    if uploads.mask is not None and "mask_image" not in known:
        raise _unsupported(
            "mask", f"this model, a {model.pipeline}, takes no mask: serve an inpainting model, or leave it out"
        )
    if uploads.mask is None and "mask_image" in known:
        raise RequestError(
            "this model needs a mask: a PNG that is transparent where the image is to be painted anew",
            param="mask",
            code="missing_parameter",
        )
    if "strength" in known or "mask_image" in known:
        return _begun(model, sides, uploads)
    images = list(uploads.images)
    return {"image": images if len(images) > 1 else images[0], **_taken(model, sides)}


def _begun(model: PipelineInfo, sides: Mapping[str, int], uploads: Uploads) -> dict[str, Any]:
    """Return the arguments of a call that begins with the one image."""
    if len(uploads.images) > 1:
        raise _unsupported("image", f"{len(uploads.images)} images: this model, a {model.pipeline}, begins with one")
    (image,) = uploads.images
    unit = model.size_unit
    own = {name: max(MIN_SIDE, side // unit * unit) for name, side in zip(("width", "height"), image.size, strict=True)}
    target = {**own, **sides}
    size = target["width"], target["height"]
    masks = {} if uploads.mask is None else {"mask_image": uploads.mask.resized(size)}
    return {"image": image.resized(size), **masks, **({} if "height" not in model.parameters else target)}


def _taken(model: PipelineInfo, sides: Mapping[str, int]) -> dict[str, int]:
    if sides and "height" not in model.parameters:
        raise RequestError("this model chooses the size itself: leave size out", param="size", code="invalid_size")
    return dict(sides)


def uploaded_size(model: PipelineInfo, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return height and width in pixels of the result, or of its first image where the model chooses them."""
    image = arguments["image"][0] if isinstance(arguments["image"], list) else arguments["image"]
    return model.size(arguments) or (image.height, image.width)


def _unsupported(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")
