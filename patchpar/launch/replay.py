"""What new workers are told of what the ones before had been: the calls that made them what they were, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patchpar.launch.wire import Message, encode_call


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a call changes, as far as later calls can take its place or take it back.

    `sets`: the dotted name of what it sets, whatever that was before. `kind`: what it belongs to, if that can be taken
    back as a whole. `undoes`: it takes back all of that kind, unless a call of the kind `unless` still holds; with a
    `kind` it is kept itself. `given`: the arguments that decide what is set, by position or name.
    """

    sets: str | None = None
    given: frozenset[str | int] = frozenset()
    kind: str | None = None
    undoes: str | None = None
    unless: str | None = None

    def concerns(self, name: str) -> bool:
        """Whether this may have to do with what has that name."""
        mine = self.sets
        return mine is None or mine == name or mine.startswith(f"{name}.") or name.startswith(f"{mine}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A call to be repeated, and what it changes."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: float
    sent: Message | None  # as it was, if it is small; large arguments are not kept twice
    change: Change

    def message(self) -> Message:
        """The call, to be sent again."""
        return self.sent or encode_call(self.method, self.args, self.kwargs, self.expected)


class Replays:
    """Calls in the order in which they were made, without those that have been replaced or taken back."""

    def __init__(self) -> None:
        self._entries: list[Replay] = []

    def __iter__(self) -> Iterator[Replay]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Replay) -> None:
        """Keep a call, unless all that it does is to take back others, and forget what it replaces or takes back."""
        change = entry.change
        if change.undoes is not None and self._take_back(change.undoes, change.unless) and change.kind is None:
            return
        if change.sets is not None:
            self._replace(change.sets, change.given)
        self._entries.append(entry)

    def _take_back(self, kind: str, unless: str | None) -> bool:
        """Forget all of a kind; whether that could be done."""
        if unless is not None and any(entry.change.kind == unless for entry in self._entries):
            return False
        self._entries = [entry for entry in self._entries if entry.change.kind != kind]
        return True

    def _replace(self, name: str, given: frozenset[str | int]) -> None:
        """Forget calls that set the same with no more arguments, back to one that may have to do with it."""
        for place in reversed(range(len(self._entries))):
            entry = self._entries[place]
            if entry.change.sets == name and entry.change.given <= given:
                del self._entries[place]
            elif entry.change.concerns(name):
                return
