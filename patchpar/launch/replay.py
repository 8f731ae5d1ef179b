"""The calls that restarted workers repeat, in order, to get into the state of the previous ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from patchpar.launch.adapter_replay import NamedAdapters, settled
from patchpar.launch.messages import EncodedMessage, encode_call


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
    """A call to repeat, and what it changes."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: float
    change: CallEffects
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
        return iter(self._entries)

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
