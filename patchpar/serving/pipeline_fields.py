"""Fields that all requests have in common, with their types, and errors of bodies. Limits and the model come later."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from patchpar.serving.request_error import RequestError, nearest

MAX_SEED = 2**63 - 1
MAX_DEADLINE = 24 * 3600 * 1000
MAX_SCALE, MAX_LORAS = 10.0, 8
MAX_PRIORITY = 10
Text = Annotated[str, Field(max_length=32_000)]

_UPLOADS = "send it as a file of a form (multipart/form-data), to /v1/images/edits or /v1/videos; never a path or URL"
OF_OTHERS = {
    **dict.fromkeys(("image", "mask", "input_reference"), _UPLOADS),
    **dict.fromkeys(("complexity", "frame_count", "input_fidelity"), "does not apply here: leave it out"),
}
"""Fields of other requests, and why they are refused here."""
NOT_MADE = {"output_format": ("gif", "svg")}
"""Values of OpenAI's that no model of this package can have."""

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LoraField(BaseModel):
    """A registered LoRA. `scale`: None for that with which it was registered."""

    model_config = STRICT

    name: Annotated[str, Field(min_length=1, max_length=256)]
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)] | None = None


Loras = Annotated[list[LoraField], Field(max_length=MAX_LORAS)]


class PipelineFields(BaseModel):
    """Arguments of the pipeline and of its call. None is a field that was left out. `height` and `width` in pixels.

    `deadline_ms`: milliseconds from the arrival of the request. `priority`: those of a higher one come first.
    `degree`: devices that work on it, with an automatic plan. `lora`: those that act, each as a name and a scale; in a
    form their JSON. `exactness`: "exact" keeps it out of batches.
    """

    model_config = STRICT

    prompt: Annotated[Text, Field(pattern=r"\S")]
    model: Text | None = None
    size: Text | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    negative_prompt: Text | None = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    true_cfg_scale: Annotated[float, Field(ge=0, le=100)] | None = None
    strength: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    height: Annotated[int, Field(ge=1)] | None = None
    width: Annotated[int, Field(ge=1)] | None = None
    plan: Text | None = None
    strategy: Text | None = None
    degree: Annotated[int, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE)] | None = None
    lora: Loras | None = None
    exactness: Literal["any", "exact"] | None = None


F = TypeVar("F", bound=BaseModel)


def field_of(message: str) -> str | None:
    """Return the field that a message of the pipeline begins with, as in "strength=0.01: ..."; None for another one."""
    name = message.partition("=")[0]
    return name if name in PipelineFields.model_fields else None


def from_json(kind: type[F], body: bytes | str) -> F:
    """Return the fields of a JSON body. Raises RequestError that names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, kind) from None


def from_texts(kind: type[F], values: dict[str, str]) -> F:
    """Return the fields of a form, whose values are all text. Raises RequestError as `from_json` does."""
    given = {name: value for name, value in values.items() if value != ""}
    lora = given.pop("lora", None) if issubclass(kind, PipelineFields) else None
    try:
        found = kind.model_validate_strings(given)
        return found if lora is None else found.model_copy(update={"lora": _loras_of(lora)})
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _loras_of(text: str) -> list[LoraField] | None:
    """Return the LoRAs of a form's field. Raises RequestError, and ValidationError that names the field."""
    try:
        found = json.dumps({"prompt": "any", "lora": TypeAdapter(Any).validate_json(text)})
    except ValueError:
        raise RequestError('lora: write it as JSON, such as [{"name": "ink", "scale": 0.8}]', param="lora") from None
    return PipelineFields.model_validate_json(found).lora


def _refusal(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """Return the error for the client: unknown names first, since a wrong name often is the cause of the others."""
    found = error.errors(include_url=False, include_context=False)
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    location = first["loc"]
    if len(location) > 1 and isinstance(location[1], str):  # a type, of those that a field may have
        location = location[:1]
    name = ".".join(map(str, location))
    if first["type"] == "json_invalid":
        return RequestError(f"the body is no JSON: {first['msg']}", code="invalid_json")
    if not location:
        example = f'{{"{next(iter(kind.model_fields))}": ...}}'
        return RequestError(f"the body is no JSON object: send {example}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        if issubclass(kind, PipelineFields) and name in OF_OTHERS:
            return RequestError(f"{name}: {OF_OTHERS[name]}", param=name, code="unsupported_parameter")
        return _unknown(name, tuple(kind.model_fields if len(location) == 1 else LoraField.model_fields))
    if first["type"] in ("missing", "string_pattern_mismatch"):
        return _missing(name, first["type"])
    given = "" if isinstance(first["input"], (dict, list)) else f"={_as_sent(first['input'])}"
    code = "unsupported_parameter" if first["input"] in NOT_MADE.get(name, ()) else "invalid_value"
    return RequestError(f"{name}{given}: {first['msg']}", param=name, code=code)


def _as_sent(value: Any) -> str:
    """Return a value in JSON, cut to 40 characters, so that a number is told from text with the same digits."""
    return json.dumps(value[:40]) if isinstance(value, str) else json.dumps(value)[:40]


def _missing(name: str, kind: str) -> RequestError:
    if name != "prompt":
        return RequestError(f"{name} is missing", param=name, code="missing_parameter")
    if kind == "missing":
        return RequestError("there is no prompt: describe the result", param=name, code="missing_parameter")
    return RequestError("the prompt is empty: describe the result", param=name)


def _unknown(name: str, known: Sequence[str]) -> RequestError:
    short = name[:64]
    near = nearest(short.rpartition(".")[2], known)
    hint = f"; did you mean {near!r}?" if near else f". There are {', '.join(known)}"
    return RequestError(f"there is no parameter {short!r}{hint}", param=short, code="unknown_parameter")


def check_only(request: BaseModel, only: dict[str, tuple[Any, str]]) -> None:
    """Raise RequestError for a field of `only` with another value than those listed."""
    for name, (accepted, reason) in only.items():
        value = getattr(request, name)
        if value is not None and value not in accepted:
            raise RequestError(f"{name}={value!r}: {reason}", param=name, code="unsupported_parameter")
