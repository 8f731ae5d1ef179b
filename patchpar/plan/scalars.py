"""What counts as a number: numbers of numpy and torch where Python's own are expected; no bool. Imports neither.

Sizes that come out of an array's arithmetic are numpy's, and none of them is an `int` to `isinstance`.
"""

import math
from dataclasses import fields
from typing import Any, TypeGuard


def is_whole(value: object, least: float = 1, most: float = math.inf) -> TypeGuard[int]:
    """Whether `value` is a whole number from `least` to `most`. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[float]:
    """Whether `value` is a number from `least` to `most`. True and False are none, nor is not-a-number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def plain(value: Any) -> Any:
    """Python's own number for a number of numpy's or a tensor without dims; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def make_plain(options: Any) -> None:
    """Let every field of a dataclass, also of a frozen one that is being made, hold Python's own numbers."""
    for field in fields(options):
        object.__setattr__(options, field.name, plain(getattr(options, field.name)))
