"""Calls that add, select and delete parts by name, such as adapters: what of them new workers have to be told.

Of parts that are gone nothing is told, so that nobody needs what they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapters:
    """What a call does to parts by name. `without`: its arguments without some of the names, if it selects.

    What is added becomes active, alone; what is selected is active from then on, with the weights that the call says,
    and nothing else. When active ones are deleted, the others of them stay active. If none is left, another one
    becomes active, and which one is known only where there is just one.
    """

    does: Literal["adds", "selects", "deletes"]
    names: frozenset[str]
    without: Callable[[frozenset[str]], tuple[Any, ...]] | None = None

    def left(self, gone: frozenset[str]) -> NamedAdapters | None:
        """The same for the other names; None where nothing is left."""
        names = self.names - gone
        return replace(self, names=names) if names else None


def settled(calls: Sequence[NamedAdapters]) -> list[NamedAdapters | None]:
    """What is left of each call, the last of which is new, so that the same parts are there and active."""
    *before, latest = calls
    present = _present(calls)
    if latest.does == "selects" and latest.names >= present:
        return [each if each is not None and each.does == "adds" else None for each in _lasting(before)] + [latest]
    if latest.does == "selects":
        return [None if each.does == "selects" and each.names <= latest.names else each for each in before] + [latest]
    if latest.does == "deletes" and (len(present) <= 1 or _is_known_what_is_active(before, latest.names)):
        return _lasting(calls)
    return list(calls)


def _present(calls: Sequence[NamedAdapters]) -> frozenset[str]:
    """Parts that are there in the end."""
    names: frozenset[str] = frozenset()
    for each in calls:
        names = names | each.names if each.does == "adds" else names - each.names if each.does == "deletes" else names
    return names


def _lasting(calls: Sequence[NamedAdapters]) -> list[NamedAdapters | None]:
    """Calls that add and select without what has been deleted after them, and none that deletes."""
    left: list[NamedAdapters | None] = []
    deleted: frozenset[str] = frozenset()
    for each in reversed(calls):
        if each.does == "deletes":
            deleted |= each.names
        left.append(None if each.does == "deletes" else each.left(deleted))
    return left[::-1]


def _is_known_what_is_active(before: Sequence[NamedAdapters], deleted: frozenset[str]) -> bool:
    """Whether others than these have been selected, and what came after that has nothing to do with these."""
    for each in reversed(before):
        if each.does == "selects":
            return bool(each.names - deleted)
        if each.does == "deletes" or each.names & deleted:
            return False
    return False
