"""Facts out of files that somebody else may have written: of the right kind and within limits, or refused in words."""

from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_number, is_whole


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number from `least` to `most`. Raises PlanError."""
    if not is_whole(value, least, most):
        raise PlanError(f"{name}={value!r:.80}: it must be a whole number from {least} to {most}")
    return value


def number(name: str, value: Any, least: float, most: float) -> float:
    """A number from `least` to `most`. Raises PlanError."""
    if not is_number(value, least, most):
        raise PlanError(f"{name}={value!r:.80}: it must be a number from {least:g} to {most:g}")
    return float(value)


def text(name: str, value: Any, most: int) -> str:
    """A text of at most `most` characters. Raises PlanError."""
    if not isinstance(value, str) or len(value) > most:
        raise PlanError(f"{name}={value!r:.80}: it must be a text of at most {most} characters")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False. Raises PlanError."""
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r:.80}: it must be true or false")
    return value
