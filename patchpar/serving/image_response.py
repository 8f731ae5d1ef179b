"""The response to a request for images: OpenAI's fields, and `patchpar` with the figures of the call."""

import time
from typing import Any

from patchpar.serving.generation import GeneratedImages
from patchpar.serving.image_call import ImageCall
from patchpar.serving.image_encoding import encode_image
from patchpar.serving.image_request import GenerationRequest

LATENT = 8
"""Side in pixels of what `output_tokens` counts."""


def response_of(
    request: GenerationRequest, call: ImageCall, done: GeneratedImages, queued_seconds: float
) -> dict[str, Any]:
    """Return the JSON of a response. Encodes the images, which takes a good part of a second for large ones."""
    output_format = request.output_format or "png"
    data = [{"b64_json": encode_image(each, output_format, request.output_compression)} for each in done.images]
    width, height = done.images[0].size
    return {
        "created": int(time.time()),
        "data": data,
        "size": f"{width}x{height}",
        "output_format": output_format,
        "background": "opaque",
        "quality": request.quality or "auto",
        "usage": _usage(done.prompt_tokens, len(data) * (width // LATENT) * (height // LATENT)),
        "patchpar": {
            "seed": call.seed,
            "plan": str(done.runs[0].plan),
            "reason": done.reason,
            "ranks": len(done.runs[0].ranks),
            "seconds": round(sum(run.seconds for run in done.runs), 4),
            "queued_seconds": round(queued_seconds, 4),
            "steps": sum(run.steps for run in done.runs),
        },
    }


def _usage(text_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": text_tokens,
        "output_tokens": output_tokens,
        "total_tokens": text_tokens + output_tokens,
        "input_tokens_details": {"text_tokens": text_tokens, "image_tokens": 0},
    }
