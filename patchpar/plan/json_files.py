"""Untrusted JSON files: of limited size, with an error message for each that is invalid."""

import json
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError

LIMIT = 16 * 2**20
"""Largest file in bytes. Configurations of the largest tokenizers have about 2 MiB."""


def read_object(file: Path, *, limit: int = LIMIT) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes. Raises PlanError if there is none."""
    try:
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error}") from error
    if len(data) > limit:
        raise PlanError(f"{file} has more than {limit} bytes, too large for a configuration: fetch the model again")
    return object_of(data, str(file))


def object_of(text: str | bytes, source: str) -> dict[str, Any]:
    """Return the JSON object in a text. `source`: its origin, for the message. Raises PlanError."""
    try:
        found = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise PlanError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"{source} holds no JSON object, but a {type(found).__name__}")
    return found
