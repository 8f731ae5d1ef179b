"""Validation of JSON fields from untrusted files: type and limits, with a PlanError that names field and value."""

from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_number, is_whole


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Return `value` if it is a whole number from `least` to `most`. Raises PlanError."""
    if not is_whole(value, least, most):
        raise PlanError(f"{name}={value!r:.80}: it must be a whole number from {least} to {most}")
    return value


def number(name: str, value: Any, least: float, most: float) -> float:
    """Return `value` as a float if it is a number from `least` to `most`. Raises PlanError."""
    if not is_number(value, least, most):
        raise PlanError(f"{name}={value!r:.80}: it must be a number from {least:g} to {most:g}")
    return float(value)


def text(name: str, value: Any, most: int) -> str:
    """Return `value` if it is a text of at most `most` characters. Raises PlanError."""
    if not isinstance(value, str) or len(value) > most:
        raise PlanError(f"{name}={value!r:.80}: it must be a text of at most {most} characters")
    return value


def flag(name: str, value: Any) -> bool:
    """Return `value` if it is a bool. Raises PlanError."""
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r:.80}: it must be true or false")
    return value
