"""Files of JSON that somebody else may have written: data of limited size, refused in words where they are none."""

import json
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError

LIMIT = 16 * 2**20
"""Bytes of a file. The configurations of the largest tokenizers have some 2 MiB."""


def read_object(file: Path, *, limit: int = LIMIT) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises PlanError if it cannot be read or is none."""
    try:
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error}") from error
    if len(data) > limit:
        raise PlanError(f"{file} has more than {limit} bytes, which is no file of facts about a model")
    return object_of(data, str(file))


def object_of(text: str | bytes, source: str) -> dict[str, Any]:
    """The JSON object that a text is. `source`: where it is from, for the message. Raises PlanError."""
    try:
        found = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise PlanError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"{source} holds no JSON object, but a {type(found).__name__}")
    return found
