"""The bodies of requests for images: OpenAI's fields and ours."""

from typing import Annotated, Any, Literal

from pydantic import Field

from patchpar.serving.pipeline_fields import PipelineFields, Text, check_only, from_json, from_texts
from patchpar.serving.request_error import RequestError

OutputFormat = Literal["png", "jpeg", "webp"]
LOSSLESS = 100
"""The compression of a PNG in OpenAI's terms."""


class GenerationRequest(PipelineFields):
    """The fields of POST /v1/images/generations."""

    n: Annotated[int, Field(ge=1, le=10)] | None = None
    output_format: OutputFormat | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: Text | None = None
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"] | None = None
    previews: Literal["linear", "vae"] | None = None
    background: Text | None = None
    style: Text | None = None
    moderation: Text | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None

    @property
    def partial_count(self) -> int:
        """Number of partial images before each image."""
        return (self.partial_images or 0) if self.stream else 0


class EditRequest(GenerationRequest):
    """The fields of POST /v1/images/edits beside its files, `image` and `mask`."""

    input_fidelity: Literal["high", "low"] | None = None


FIELDS = tuple(GenerationRequest.model_fields)
ONLY: dict[str, tuple[Any, str]] = {
    "response_format": (("b64_json", "url"), "images are returned as b64_json, or as url where there is --files"),
    "background": (("auto", "opaque"), "images are opaque"),
    "style": (("vivid", "natural"), "a style is written into the prompt"),
    "moderation": (("auto",), "this server does not moderate"),
}
"""Fields with few values, and why others are refused."""


def parse_request(body: bytes) -> GenerationRequest:
    """Return the request of a JSON body. Raises RequestError that names the first wrong field."""
    request = from_json(GenerationRequest, body)
    _check(request)
    return request


def parse_edit(values: dict[str, str]) -> EditRequest:
    """Return the request of a form's text fields. Raises RequestError that names the first wrong field."""
    request = from_texts(EditRequest, values)
    _check(request)
    return request


def parse_edit_text(body: bytes) -> EditRequest:
    """Return the request of the JSON of a WebSocket, which has one image for each. Raises RequestError as others do."""
    request = from_json(EditRequest, body)
    _check(request, output_format="jpeg")
    for name in ("n", "stream", "partial_images"):
        if getattr(request, name) not in (None, 0, 1, False):
            raise RequestError(f"{name}: a WebSocket sends one image for each: leave it out", param=name)
    check_only(request, {"response_format": (("b64_json",), "a WebSocket sends files: leave it out")})
    return request


def _check(request: GenerationRequest, output_format: OutputFormat = "png") -> None:
    """Raise RequestError for fields that do not go together. `output_format`: of a request that gives none."""
    check_only(request, ONLY)
    if (request.output_format or output_format) == "png" and request.output_compression not in (None, LOSSLESS):
        raise RequestError(
            f"output_compression={request.output_compression} with PNG, which has no quality: add output_format "
            "jpeg or webp, or leave it out",
            param="output_compression",
            code="unsupported_parameter",
        )
    if request.partial_images and not request.stream:
        raise RequestError(
            f"partial_images={request.partial_images}: they are sent with stream=true only: add it, or leave them out",
            param="partial_images",
            code="unsupported_parameter",
        )
    if request.stream and request.response_format == "url":
        raise RequestError(
            "response_format='url' with stream=true: events have their images as b64_json: leave one out",
            param="response_format",
            code="unsupported_parameter",
        )
