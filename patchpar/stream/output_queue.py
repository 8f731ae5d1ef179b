"""What is ready, for a watcher who may be slow: it waits, or is lost by a rule. Never more than there is credit."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar, get_args

from patchpar.errors import PlanError

Output = Literal["block", "drop_oldest", "skip_to_live"]
T = TypeVar("T")


def check_output(output: str) -> None:
    """Raise PlanError for a policy that is none."""
    if output not in get_args(Output):
        raise PlanError(f"output={output!r}: use one of {', '.join(get_args(Output))}")


class OutputQueue(Generic[T]):
    """Used under a lock of its owner's, who is told by `lost` of everything that nobody will take.

    `output`: "block" keeps all; "drop_oldest" keeps the newest `room`; "skip_to_live" gives the newest only.
    """

    def __init__(self, output: Output, room: int, lost: Callable[[], object]) -> None:
        check_output(output)
        self._output, self._room, self._lost = output, room, lost
        self._ready: deque[T] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, item: T) -> None:
        """One more is ready."""
        self._ready.append(item)
        if self._output != "block":
            self._drop(len(self._ready) - self._room)

    def take(self) -> T:
        """The next. There has to be one."""
        if self._output == "skip_to_live":
            self._drop(len(self._ready) - 1)
        return self._ready.popleft()

    def flush(self) -> int:
        """Lose all; how many."""
        count = len(self._ready)
        self._drop(count)
        return count

    def clear(self) -> None:
        """Forget all, without a word to the owner: the stream is over."""
        self._ready.clear()

    def _drop(self, count: int) -> None:
        for _ in range(max(0, count)):
            self._ready.popleft()
            self.dropped += 1
            self._lost()
