"""Random generators among the arguments of a call. Does not import torch, so that callers need not either."""

from collections.abc import Iterator, Mapping
from typing import Any


def generators_of(kwargs: Mapping[str, Any]) -> list[Any]:
    """Return every torch.Generator among the arguments, in order, also those in lists."""
    return [item for value in kwargs.values() for item in _items(value) if _is_generator(item)]


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    else:
        yield value


def _is_generator(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and type(value).__name__ == "Generator"
