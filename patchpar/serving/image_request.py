"""The body of a request for images: OpenAI's fields and ours, with their types. Limits and the model come later."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from patchpar.serving.request_error import RequestError, nearest

OutputFormat = Literal["png", "jpeg", "webp"]
MAX_SEED = 2**63 - 1
Text = Annotated[str, Field(max_length=32_000)]
NOT_THERE_YET = ("lora", "strength", "degree", "priority", "deadline_ms", "previews", "exactness")
"""Extensions that are planned; a request with one is refused, so that none is ignored."""
UNSUPPORTED = ("complexity", "frame_count", "input_fidelity", "mask", "image")


class GenerationRequest(BaseModel):
    """The fields of POST /v1/images/generations. None is a field that was left out. `height` and `width` in pixels."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    prompt: Annotated[Text, Field(pattern=r"\S")]
    model: Text | None = None
    n: Annotated[int, Field(ge=1, le=10)] | None = None
    size: Text | None = None
    output_format: OutputFormat | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: Text | None = None
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"] | None = None
    background: Text | None = None
    style: Text | None = None
    moderation: Text | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    negative_prompt: Text | None = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    true_cfg_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    height: Annotated[int, Field(ge=1)] | None = None
    width: Annotated[int, Field(ge=1)] | None = None
    plan: Text | None = None
    strategy: Text | None = None


FIELDS = tuple(GenerationRequest.model_fields)
ONLY: dict[str, tuple[Any, str]] = {
    "response_format": (("b64_json",), "images are returned as b64_json; this server keeps no files to link to"),
    "background": (("auto", "opaque"), "images are opaque"),
    "style": (("vivid", "natural"), "a style is written into the prompt"),
    "moderation": (("auto",), "this server does not moderate"),
    "stream": ((False,), "this server sends whole images; leave stream out"),
    "partial_images": ((0,), "this server sends whole images; leave partial_images out"),
}
"""Fields with values that change nothing, and why others are refused."""


def parse_request(body: bytes) -> GenerationRequest:
    """Return the request of a JSON body. Raises RequestError that names the first wrong field."""
    try:
        request = GenerationRequest.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, (accepted, reason) in ONLY.items():
        value = getattr(request, name)
        if value is not None and value not in accepted:
            raise RequestError(f"{name}={value!r}: {reason}", param=name, code="unsupported_parameter")
    return request


def _refusal(error: ValidationError) -> RequestError:
    """Return the error for the client: unknown names first, since a wrong name often is the cause of the others."""
    found = error.errors(include_url=False, include_context=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "json_invalid":
        return RequestError(f"the body is no JSON: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        return RequestError('the body is no JSON object: send {"prompt": "..."}', code="invalid_json")
    if first["type"] == "extra_forbidden":
        return _unknown(name)
    if first["type"] == "missing":
        return RequestError("there is no prompt: describe the image", param=name, code="missing_parameter")
    if first["type"] == "string_pattern_mismatch":
        return RequestError("the prompt is empty: describe the image", param=name, code="invalid_value")
    given = "" if isinstance(first["input"], (dict, list)) else f"={str(first['input'])[:40]!r}"
    return RequestError(f"{name}{given}: {first['msg']}", param=name, code="invalid_value")


def _unknown(name: str) -> RequestError:
    short = name[:64]
    if short in NOT_THERE_YET:
        return RequestError(f"{short} is not there yet: leave it out", param=short, code="unsupported_parameter")
    if short in UNSUPPORTED:
        return RequestError(f"{short} does not apply to images from text", param=short, code="unsupported_parameter")
    near = nearest(short, FIELDS)
    hint = f"; did you mean {near!r}?" if near else f". There are {', '.join(FIELDS)}"
    return RequestError(f"there is no parameter {short!r}{hint}", param=short, code="unknown_parameter")
