"""Bodies of requests for streams, and of their controls."""

import base64
import binascii
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from patchpar.serving.pipeline_fields import MAX_SEED, STRICT, Text
from patchpar.serving.request_error import RequestError, nearest
from patchpar.serving.uploaded_image import read_upload


class LiveStreamRequest(BaseModel):
    """The fields of POST /v1/streams beside its files. `seconds`: length; None until it is stopped.

    `audio`: "live" for audio that is sent while the stream runs, with `audio_rate` samples a second, by default as many
    as the model takes; None for silence. `fps`: frames per second. `keep_alive`: silence where audio comes late.
    """

    model_config = STRICT

    prompt: Text = ""
    model: Text | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    fps: Annotated[float, Field(ge=1, le=120)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    audio: Literal["live"] | None = None
    audio_rate: Annotated[int, Field(ge=8000, le=192_000)] | None = None
    keep_alive: bool = False
    user: Text | None = None


class StreamControl(BaseModel):
    """A control. `at`: the block from which it holds, by default the next. `image`: base64 of a reference."""

    model_config = STRICT

    type: Literal["prompt", "param", "reference", "pause", "resume", "flush", "interrupt", "end_audio", "stop"]
    at: Annotated[int, Field(ge=0)] | None = None
    text: Text | None = None
    transition: Literal["switch", "cut", "blend", "recache"] | None = None
    over: Annotated[int, Field(ge=0, le=1000)] | None = None
    name: Text | None = None
    value: Annotated[float, Field(allow_inf_nan=False)] | None = None
    image: Annotated[str, Field(max_length=16 << 20)] | None = None


OF_CONTROLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prompt": (("text",), ("at", "transition", "over")),
    "param": (("name", "value"), ("at",)),
    "reference": (("image",), ("at",)),
}
"""By type: fields that it needs, and others that it takes."""
M = TypeVar("M", bound=BaseModel)


def parse_stream(body: bytes) -> LiveStreamRequest:
    """Return the request of a JSON body. Raises RequestError that names the first wrong field."""
    return _parsed(LiveStreamRequest, lambda: LiveStreamRequest.model_validate_json(body))


def parse_stream_form(values: dict[str, str]) -> LiveStreamRequest:
    """Return the request of a form's text fields. Raises RequestError as `parse_stream` does."""
    given = {name: value for name, value in values.items() if value != ""}
    return _parsed(LiveStreamRequest, lambda: LiveStreamRequest.model_validate_strings(given))


def parse_control(body: bytes | str) -> StreamControl:
    """Return a control of a JSON body. Raises RequestError for a wrong field, one too many and one that is missing."""
    found = _parsed(StreamControl, lambda: StreamControl.model_validate_json(body))
    needed, others = OF_CONTROLS.get(found.type, ((), ()))
    for name in needed:
        if getattr(found, name) is None:
            raise RequestError(f"{found.type}: {name} is missing", param=name, code="missing_parameter")
    for name in found.model_fields_set - {"type", *needed, *others}:
        reason = f"{name} does not go with {found.type}: leave it out"
        raise RequestError(reason, param=name, code="unsupported_parameter")
    return found


def reference_of(control: StreamControl) -> Any:
    """Return the PIL image of a control. Raises RequestError."""
    try:
        data = base64.b64decode(control.image or "", validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("image: it must be base64 of a PNG, JPEG or WebP file", param="image") from None
    return read_upload(data, "image")


def _parsed(kind: type[M], parse: Any) -> M:
    try:
        found: M = parse()
    except ValidationError as error:
        raise _refusal(error, tuple(kind.model_fields)) from None
    return found


def _refusal(error: ValidationError, known: tuple[str, ...]) -> RequestError:
    found = error.errors(include_url=False, include_context=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    name = ".".join(map(str, first["loc"]))[:64]
    if first["type"] == "json_invalid" or not name:
        return RequestError("the body is no JSON object", code="invalid_json")
    if first["type"] == "extra_forbidden":
        near = nearest(name, known)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
        return RequestError(f"there is no parameter {name!r}; {hint}", param=name, code="unknown_parameter")
    code = "missing_parameter" if first["type"] == "missing" else "invalid_value"
    return RequestError(f"{name}: {first['msg']}", param=name, code=code)
