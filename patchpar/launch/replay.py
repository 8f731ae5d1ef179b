"""What new workers are told of what the ones before had been: the calls that made them what they were, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patchpar.launch.wire import Message, encode_call


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A call to be repeated. `settles`: the dotted name of what it sets, whatever that was before."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: float
    sent: Message | None  # as it was, if it is small; large arguments are not kept twice
    settles: str | None = None

    def message(self) -> Message:
        """The call, to be sent again."""
        return self.sent or encode_call(self.method, self.args, self.kwargs, self.expected)

    def concerns(self, name: str) -> bool:
        """Whether what this call does may have to do with what has that name."""
        mine = self.settles
        return mine is None or mine == name or mine.startswith(f"{name}.") or name.startswith(f"{mine}.")


class Replays:
    """Calls in the order in which they were made. What is set again and again is kept once: the last time."""

    def __init__(self) -> None:
        self._entries: list[Replay] = []

    def __iter__(self) -> Iterator[Replay]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Replay) -> None:
        """Keep a call; one that set the same is forgotten, unless a call since may have to do with it."""
        if entry.settles is not None:
            self._forget(entry.settles)
        self._entries.append(entry)

    def _forget(self, name: str) -> None:
        for place in reversed(range(len(self._entries))):
            if self._entries[place].settles == name:
                del self._entries[place]
                return
            if self._entries[place].concerns(name):
                return
