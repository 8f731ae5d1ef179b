"""A promise that holds for many models, schedulers or options: some of them in every run, all with `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(names: Iterable[Any], *always: Any) -> list[Any]:
    """`names` for `parametrize`, those that are not in `always` marked to be left out of the quick run.

    Raises ValueError for one of `always` that is none of `names`.
    """
    names = list(names)
    unknown = [name for name in always if name not in names]
    if unknown:
        raise ValueError(f"{unknown} is none of {names}")
    return [name if name in always else pytest.param(*each(name), marks=pytest.mark.breadth) for name in names]


def each(value: Any) -> tuple[Any, ...]:
    """The arguments of one case."""
    return value if isinstance(value, tuple) else (value,)
