"""Numbers of numpy and torch where Python's own are expected. Imports neither.

Sizes that come out of an array's arithmetic are numpy's, and none of them is an `int` to `isinstance`.
"""

from dataclasses import fields
from typing import Any


def plain(value: Any) -> Any:
    """Python's own number for a number of numpy's or a tensor without dims; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def make_plain(options: Any) -> None:
    """Let every field of a dataclass, also of a frozen one that is being made, hold Python's own numbers."""
    for field in fields(options):
        object.__setattr__(options, field.name, plain(getattr(options, field.name)))
