"""Parts of an image in proportion to speeds, as the whole numbers of a plan's ratio."""

from collections.abc import Sequence
from math import gcd

UNITS = 128
"""Parts are whole numbers of about so many units together; a network rounds them to its rows."""


def ratio_of(speeds: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in proportion to speeds, each at least 1, about UNITS together or a fraction of that."""
    total = sum(speeds)
    units = [max(1, round(UNITS * speed / total)) for speed in speeds]
    common = gcd(*units)
    return tuple(each // common for each in units)
