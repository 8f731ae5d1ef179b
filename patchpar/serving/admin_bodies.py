"""The bodies of requests of administrators: a LoRA to register, and a rank to start again."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from patchpar.errors import PlanError
from patchpar.serving.lora_registry import RegisteredLora
from patchpar.serving.pipeline_fields import STRICT, from_json
from patchpar.serving.request_error import RequestError

MAX_DIGITS = 9


class LoraBody(BaseModel):
    """The fields of POST /admin/lora. `path`: a file or folder on the server's machine."""

    model_config = STRICT

    name: Annotated[str, Field(min_length=1, max_length=64)]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    scale: float = 1.0


class RankBody(BaseModel):
    """The fields of POST /admin/ranks. `rank`: one that has been removed."""

    model_config = STRICT

    rank: Annotated[int, Field(ge=0)]


def parse_rank(body: bytes) -> int:
    """Return the rank of a JSON body. Raises RequestError that names the first wrong field."""
    return from_json(RankBody, body).rank


def rank_of(text: str) -> int:
    """Return the rank of a path. Raises RequestError, 404, for text that is no number of one."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise RequestError(f"there is no rank {text[:40]!r}", status=404, code="not_found")
    return int(text)


def parse_lora(body: bytes) -> RegisteredLora:
    """Return the LoRA of a JSON body. Raises RequestError that names the first wrong field."""
    found = from_json(LoraBody, body)
    if not _exists(found.path):
        raise RequestError(f"path {found.path[:200]!r}: there is no such file or folder here", param="path")
    try:
        return RegisteredLora(name=found.name, source=found.path, scale=found.scale)
    except PlanError as error:
        raise RequestError(str(error), param="name") from None


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # a name that is too long, has a null byte, or a user who is none
        return False
