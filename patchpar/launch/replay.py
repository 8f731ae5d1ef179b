"""The calls that restarted workers repeat, in order, to get into the state of the previous ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from patchpar.launch.messages import EncodedMessage, encode_call


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEffects:
    """What a call changes, so that later calls can replace or undo it.

    `sets`: the dotted name of what it sets, independent of the value before. `kind`: its group, if the group can be
    undone as a whole. `undoes`: it undoes all calls of that kind; with a `kind` it is recorded itself. `parts`: the
    adapters that it names, for `settled`. Calls are neither undone nor settled while a call of one of the kinds
    `unless` is recorded. `given`: positions and names of the arguments that decide what is set.
    """

    sets: str | None = None
    given: frozenset[str | int] = frozenset()
    kind: str | None = None
    undoes: str | None = None
    unless: tuple[str, ...] = ()
    parts: NamedAdapters | None = None

    @classmethod
    def of(cls, replay: bool | str | CallEffects) -> CallEffects:
        """Return the effects that `Executor.call` is told by its argument `replay`."""
        return replay if isinstance(replay, CallEffects) else cls(sets=None if replay is True else str(replay))

    def concerns(self, name: str) -> bool:
        """Return whether this may change what has that dotted name."""
        mine = self.sets
        return mine is None or mine == name or mine.startswith(f"{name}.") or name.startswith(f"{mine}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedCall:
    """A call to repeat, and what it changes. `divides`: see `Executor.call`."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: float
    change: CallEffects
    divides: bool | None = None
    sent: EncodedMessage | None = None  # the encoded call if it is small; large arguments are not stored twice

    def message(self) -> EncodedMessage:
        """Return the encoded call."""
        return self.sent or encode_call(self.method, self.args, self.kwargs, self.expected)

    def about(self, parts: NamedAdapters) -> ReplayedCall:
        """Return the call for these adapters only."""
        before = self.change.parts
        if before is None or parts == before or parts.without is None:
            return self
        args = parts.without(before.names - parts.names)
        return replace(self, args=args, sent=None, change=replace(self.change, parts=parts))


class ReplayLog:
    """Calls in the order in which they were made, without replaced and undone ones."""

    def __init__(self) -> None:
        self._entries: list[ReplayedCall] = []

    def __iter__(self) -> Iterator[ReplayedCall]:
        return iter(tuple(self._entries))  # another thread may add one meanwhile

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: ReplayedCall) -> None:
        """Record a call, unless it only undoes others, and remove the calls that it replaces or undoes."""
        change = entry.change
        if change.parts is not None and self._settle(entry, change):
            return
        if change.undoes is not None and self._undo(change.undoes, change.unless) and change.kind is None:
            return
        if change.sets is not None:
            self._replace(change.sets, change.given)
        self._entries.append(entry)

    def _settle(self, entry: ReplayedCall, change: CallEffects) -> bool:
        """Record a call about adapters and shorten earlier ones; return whether that was possible."""
        indices = [index for index, each in enumerate(self._entries) if each.change.kind == change.kind]
        known = [each.change.parts for each in (*(self._entries[index] for index in indices), entry)]
        parts = [each for each in known if each is not None]
        if len(parts) < len(known) or any(each.change.kind in change.unless for each in self._entries):
            return False
        calls: dict[int, ReplayedCall] = dict(enumerate((*self._entries, entry)))
        for index, left in zip((*indices, len(self._entries)), settled(parts), strict=True):
            call = calls.pop(index)
            if left is not None:
                calls[index] = call.about(left)
        self._entries = [calls[index] for index in sorted(calls)]
        return True

    def _undo(self, kind: str, unless: Collection[str]) -> bool:
        """Remove all calls of a kind; return whether that was possible."""
        if any(entry.change.kind in unless for entry in self._entries):
            return False
        self._entries = [entry for entry in self._entries if entry.change.kind != kind]
        return True

    def _replace(self, name: str, given: frozenset[str | int]) -> None:
        """Remove calls that set the same name with no more arguments, back to the last one that may concern it."""
        for index in reversed(range(len(self._entries))):
            entry = self._entries[index]
            if entry.change.sets == name and entry.change.given <= given:
                del self._entries[index]
            elif entry.change.concerns(name):
                return
