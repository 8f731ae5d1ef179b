"""Queue of finished outputs for a consumer that may be slow: outputs wait, or are dropped by a policy."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar, get_args

from patchpar.errors import PlanError

Output = Literal["block", "drop_oldest", "skip_to_live"]
T = TypeVar("T")


def check_output(output: str) -> None:
    """Raise PlanError for an unknown policy."""
    if output not in get_args(Output):
        raise PlanError(f"output={output!r}: use one of {', '.join(get_args(Output))}")


class OutputQueue(Generic[T]):
    """A queue used under its owner's lock. `lost` is called for each item that is dropped.

    `output`: "block" keeps all; "drop_oldest" keeps the newest `room`; "skip_to_live" keeps as many, and `take` returns
    the newest only. Raises PlanError.
    """

    def __init__(self, output: Output, room: int, lost: Callable[[], object]) -> None:
        check_output(output)
        self._output, self._room, self._lost = output, room, lost
        self._ready: deque[T] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, item: T) -> None:
        """Append an item."""
        self._ready.append(item)
        if self._output != "block":
            self._drop(len(self._ready) - self._room)

    def take(self) -> T:
        """Remove and return the next item. The queue must not be empty."""
        if self._output == "skip_to_live":
            self._drop(len(self._ready) - 1)
        return self._ready.popleft()

    def flush(self) -> int:
        """Drop all items; returns how many."""
        count = len(self._ready)
        self._drop(count)
        return count

    def clear(self) -> None:
        """Remove all items without calling `lost`, at the end of a stream."""
        self._ready.clear()

    def _drop(self, count: int) -> None:
        for _ in range(max(0, count)):
            self._ready.popleft()
            self.dropped += 1
            self._lost()
