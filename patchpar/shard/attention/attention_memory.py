"""Buffers in which attention layers exchange tokens, one layer after the other, with views that are made once.

For operations of all ranks alone, whose order on the device's stream keeps a layer from writing before the last one has
read; and not where gradients are recorded, which need what was read. Without such memory each layer allocates its own.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class AttentionMemory:
    """The buffers of all layers of a denoiser call, by what they hold: layers that exchange alike have the same."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def take(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned when it was last asked for by `key`, which determines it."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = make()
        known: T = found
        return known

    def clear(self) -> None:
        """Free all buffers."""
        self._found.clear()
