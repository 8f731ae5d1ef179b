"""Bodies of requests for streams, and of their controls."""

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from patchpar.serving.pipeline_fields import MAX_SEED, STRICT, Text, from_json, from_texts
from patchpar.serving.request_error import RequestError
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


def parse_stream(body: bytes) -> LiveStreamRequest:
    """Return the request of a JSON body. Raises RequestError that names the first wrong field."""
    return from_json(LiveStreamRequest, body)


def parse_stream_form(values: dict[str, str]) -> LiveStreamRequest:
    """Return the request of a form's text fields. Raises RequestError as `parse_stream` does."""
    return from_texts(LiveStreamRequest, values)


def parse_control(body: bytes | str) -> StreamControl:
    """Return a control of a JSON body. Raises RequestError for a wrong field, one too many and one that is missing."""
    found = from_json(StreamControl, body)
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
