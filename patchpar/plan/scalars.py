"""Numbers of numpy and torch where Python numbers are expected; never bool. Imports neither library.

Sizes computed with arrays are numpy numbers, which are no `int` to `isinstance`.
"""

import math
from dataclasses import fields
from typing import Any, TypeGuard

MOST_DIGITS = 10
"""Of a number in a text: Python reads no number of thousands of digits."""


def is_whole(value: object, least: float = 1, most: float = math.inf) -> TypeGuard[int]:
    """Return whether `value` is a whole number from `least` to `most`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[float]:
    """Return whether `value` is a number from `least` to `most`, and neither bool nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def whole_in(text: str) -> int | None:
    """Return the number in a text of digits 0 to 9, at most MOST_DIGITS; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def plain(value: Any) -> Any:
    """Return the Python number of a numpy number or a tensor without dims; anything else unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def make_plain(options: Any) -> None:
    """Convert every field of a dataclass, also of a frozen one, to Python numbers."""
    for field in fields(options):
        object.__setattr__(options, field.name, plain(getattr(options, field.name)))
