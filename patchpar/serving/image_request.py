"""The bodies of requests for images: OpenAI's fields and ours."""

from typing import Annotated, Any, Literal

from pydantic import Field

from patchpar.serving.pipeline_fields import PipelineFields, Text, check_only, from_json, from_texts
from patchpar.serving.request_error import RequestError

OutputFormat = Literal["png", "jpeg", "webp"]


class GenerationRequest(PipelineFields):
    """The fields of POST /v1/images/generations."""

    n: Annotated[int, Field(ge=1, le=10)] | None = None
    output_format: OutputFormat | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: Text | None = None
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"] | None = None
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
    "response_format": (("b64_json",), "images are returned as b64_json; this server keeps no files to link to"),
    "background": (("auto", "opaque"), "images are opaque"),
    "style": (("vivid", "natural"), "a style is written into the prompt"),
    "moderation": (("auto",), "this server does not moderate"),
}
"""Fields with values that change nothing, and why others are refused."""


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


def _check(request: GenerationRequest) -> None:
    check_only(request, ONLY)
    if request.partial_images and not request.stream:
        raise RequestError(
            f"partial_images={request.partial_images}: they are sent with stream=true only: add it, or leave them out",
            param="partial_images",
            code="unsupported_parameter",
        )
