"""The response to a request for images: OpenAI's fields, and `patchpar` with the figures of the call."""

import time
from collections.abc import Sequence
from typing import Any

from patchpar.serving.generated import GeneratedImages
from patchpar.serving.image_encoding import encode_image, image_bytes
from patchpar.serving.image_files import ImageFiles
from patchpar.serving.image_request import GenerationRequest
from patchpar.serving.job import Job
from patchpar.serving.partial_images import CompletedImage, ImageFigures, PartialImage

LATENT = 8
"""Side in pixels of what `output_tokens` counts."""


def response_of(job: Job, done: GeneratedImages, files: ImageFiles) -> dict[str, Any]:
    """Return the JSON of the response to a job. Encodes the images: a good part of a second for large ones.

    `files`: where images are kept that the response links to, by paths on this server.
    """
    request = job.source.request
    data, last = [_encoded(request, each, files) for each in done.images], done.completed[-1]
    return {
        "created": int(time.time()),
        "data": data,
        **_described(request, last.image),
        "usage": _usage(last.prompt_tokens, len(data) * _output_tokens(last.image)),
        "patchpar": _figures(job, 0, done.figures, last.reason),
    }


def event_fields(job: Job, event: PartialImage | CompletedImage) -> dict[str, Any]:
    """Return the fields of an event of a job. Encodes its image."""
    request: GenerationRequest = job.source.request
    kind = f"image_{job.source.route}"
    output_format = request.output_format or "png"
    fields = {
        "b64_json": encode_image(event.image, output_format, request.output_compression),
        "created_at": int(time.time()),
        "image_index": event.image_index,
        **_described(request, event.image),
    }
    if isinstance(event, PartialImage):
        return {"type": f"{kind}.partial_image", "partial_image_index": event.index, **fields}
    return {
        "type": f"{kind}.completed",
        **fields,
        "usage": _usage(event.prompt_tokens, _output_tokens(event.image)),
        "patchpar": _figures(job, event.image_index, (event.figures,), event.reason),
    }


def _encoded(request: GenerationRequest, image: Any, files: ImageFiles) -> dict[str, str]:
    output_format = request.output_format or "png"
    if request.response_format == "url":
        return {"url": files.store(image_bytes(image, output_format, request.output_compression), output_format)}
    return {"b64_json": encode_image(image, output_format, request.output_compression)}


def _described(request: GenerationRequest, image: Any) -> dict[str, str]:
    return {
        "size": f"{image.width}x{image.height}",
        "output_format": request.output_format or "png",
        "background": "opaque",
        "quality": request.quality or "auto",
    }


def _figures(job: Job, first: int, calls: Sequence[ImageFigures], reason: str) -> dict[str, Any]:
    """Return what is told of the calls of images from number `first` on."""
    return {
        "seed": job.source.call.seeds[first],
        "plan": calls[0].plan,
        "reason": reason,
        "ranks": calls[0].ranks,
        "seconds": round(sum(call.seconds for call in calls), 4),
        "queued_seconds": round(job.queued_seconds, 4),
        "steps": sum(call.steps for call in calls),
        "recovered": sum(call.recovered for call in calls),
    }


def _output_tokens(image: Any) -> int:
    return int((image.width // LATENT) * (image.height // LATENT))


def _usage(text_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": text_tokens,
        "output_tokens": output_tokens,
        "total_tokens": text_tokens + output_tokens,
        "input_tokens_details": {"text_tokens": text_tokens, "image_tokens": 0},
    }
