"""Stale values that are sent in the step that reads them, a few exchange points ahead of the one that does.

So only the messages of these few are in memory at a time, not those of the whole step. All ranks have the same exchange
points in the same order, so that their messages match.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from patchpar.shard.stale.workspace import Workspace

AHEAD = 2  # exchange points, whose computation hides the transfer
NUM_BUFFERS = AHEAD + 1


class LateExchange(NamedTuple):
    """An exchange point that sends late.

    `start` sends this rank's values and receives the others' into the memory given; `drop` waits for what has been
    started, if it has not been waited for, and discards it. Both raise ExchangeError.
    """

    start: Callable[[Workspace], None]
    drop: Callable[[], None]


class SendWindow:
    """The exchange points of one guidance call that send late, in the order in which they first ran.

    They receive into the NUM_BUFFERS `buffers` in turns.
    """

    def __init__(self, buffers: Sequence[Workspace]) -> None:
        self._buffers = buffers
        self._exchanges: list[LateExchange] = []
        self._started = 0

    def begin(self) -> None:
        """Begin a denoiser call."""
        self._started = 0

    def add(self, exchange: LateExchange) -> int:
        """Add an exchange point that runs for the first time, and return its index."""
        self._exchanges.append(exchange)
        return len(self._exchanges) - 1

    def reach(self, index: int) -> None:
        """Start the exchange of the exchange point that runs now, and those of the next ones. Raises ExchangeError."""
        for number in range(max(index, self._started), min(index + NUM_BUFFERS, len(self._exchanges))):
            if number >= NUM_BUFFERS:  # its memory is used again: wait for it, if its exchange point has not run
                self._exchanges[number - NUM_BUFFERS].drop()
            self._exchanges[number].start(self._buffers[number % NUM_BUFFERS])
            self._started = number + 1

    def end(self) -> None:
        """Wait for exchanges whose exchange points have not run in this call. Raises ExchangeError."""
        for exchange in self._exchanges[max(0, self._started - NUM_BUFFERS) : self._started]:
            exchange.drop()

    def clear(self) -> None:
        """Forget all exchange points. None may be in flight."""
        self._exchanges.clear()
