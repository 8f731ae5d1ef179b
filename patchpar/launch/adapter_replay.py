"""Which calls that add, select and delete named adapters a restarted worker has to repeat.

Calls about deleted adapters are dropped, so that a restart does not need the files of these adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAdapters:
    """What a call does to named adapters. `without`: arguments of a selecting call without some of the names.

    An added adapter becomes the only active one. A selection makes exactly its adapters active, with the weights of
    the call. Deletion leaves the other active adapters active. If none is left, diffusers activates another one; which
    one is known only if a single adapter remains.
    """

    does: Literal["adds", "selects", "deletes"]
    names: frozenset[str]
    without: Callable[[frozenset[str]], tuple[Any, ...]] | None = None

    def left(self, gone: frozenset[str]) -> NamedAdapters | None:
        """Return the same effect without the names in `gone`; None if no name is left."""
        names = self.names - gone
        return replace(self, names=names) if names else None


def settled(calls: Sequence[NamedAdapters]) -> list[NamedAdapters | None]:
    """Return what to repeat of each call, so that the same adapters are present and active; the last call is new."""
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
    """Return the adapters that are present after all calls."""
    names: frozenset[str] = frozenset()
    for each in calls:
        names = names | each.names if each.does == "adds" else names - each.names if each.does == "deletes" else names
    return names


def _lasting(calls: Sequence[NamedAdapters]) -> list[NamedAdapters | None]:
    """Return the adding and selecting calls without adapters that were deleted later; None for the deleting calls."""
    left: list[NamedAdapters | None] = []
    deleted: frozenset[str] = frozenset()
    for each in reversed(calls):
        if each.does == "deletes":
            deleted |= each.names
        left.append(None if each.does == "deletes" else each.left(deleted))
    return left[::-1]


def _is_known_what_is_active(before: Sequence[NamedAdapters], deleted: frozenset[str]) -> bool:
    """Return whether a selection keeps other adapters active, and no later call concerns the deleted ones."""
    for each in reversed(before):
        if each.does == "selects":
            return bool(each.names - deleted)
        if each.does == "deletes" or each.names & deleted:
            return False
    return False
