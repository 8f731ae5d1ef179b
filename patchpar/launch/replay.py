"""What new workers are told of what the ones before had been: the calls that made them what they were, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from patchpar.launch.adapter_replay import NamedAdapters, settled
from patchpar.launch.messages import EncodedMessage, encode_call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEffects:
    """What a call changes, as far as later calls can take its place or take it back.

    `sets`: the dotted name of what it sets, whatever that was before. `kind`: what it belongs to, if that can be taken
    back as a whole. `undoes`: it takes back all of that kind; with a `kind` it is kept itself. `parts`: which of its
    kind it is about, if it says so, and these are settled among themselves. Neither is done while a call of one of the
    kinds `unless` holds. `given`: the arguments that decide what is set, by position or name.
    """

    sets: str | None = None
    given: frozenset[str | int] = frozenset()
    kind: str | None = None
    undoes: str | None = None
    unless: tuple[str, ...] = ()
    parts: NamedAdapters | None = None

    def concerns(self, name: str) -> bool:
        """Whether this may have to do with what has that name."""
        mine = self.sets
        return mine is None or mine == name or mine.startswith(f"{name}.") or name.startswith(f"{mine}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedCall:
    """A call to be repeated, and what it changes."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: float
    sent: EncodedMessage | None  # as it was, if it is small; large arguments are not kept twice
    change: CallEffects

    def message(self) -> EncodedMessage:
        """The call, to be sent again."""
        return self.sent or encode_call(self.method, self.args, self.kwargs, self.expected)

    def about(self, parts: NamedAdapters) -> ReplayedCall:
        """The call for some of its parts."""
        before = self.change.parts
        if before is None or parts == before or parts.without is None:
            return self
        args = parts.without(before.names - parts.names)
        return replace(self, args=args, sent=None, change=replace(self.change, parts=parts))


class ReplayLog:
    """Calls in the order in which they were made, without those that have been replaced or taken back."""

    def __init__(self) -> None:
        self._entries: list[ReplayedCall] = []

    def __iter__(self) -> Iterator[ReplayedCall]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: ReplayedCall) -> None:
        """Keep a call, unless all that it does is to take back others, and forget what it replaces or takes back."""
        change = entry.change
        if change.parts is not None and self._settle(entry, change):
            return
        if change.undoes is not None and self._take_back(change.undoes, change.unless) and change.kind is None:
            return
        if change.sets is not None:
            self._replace(change.sets, change.given)
        self._entries.append(entry)

    def _settle(self, entry: ReplayedCall, change: CallEffects) -> bool:
        """Keep a call about parts, and of those before it what still holds; whether that could be done."""
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

    def _take_back(self, kind: str, unless: Collection[str]) -> bool:
        """Forget all of a kind; whether that could be done."""
        if any(entry.change.kind in unless for entry in self._entries):
            return False
        self._entries = [entry for entry in self._entries if entry.change.kind != kind]
        return True

    def _replace(self, name: str, given: frozenset[str | int]) -> None:
        """Forget calls that set the same with no more arguments, back to one that may have to do with it."""
        for index in reversed(range(len(self._entries))):
            entry = self._entries[index]
            if entry.change.sets == name and entry.change.given <= given:
                del self._entries[index]
            elif entry.change.concerns(name):
                return
