"""Waiting for NCCL: the GPU's stream waits for the messages, and the process continues.

`dist.Work.wait(timeout)` of NCCL blocks the *process*, which polls every millisecond and enqueues nothing meanwhile: at
a hundred exchanges in a step that costs more than the exchanges. So works are awaited without a timeout. The duration
is measured with two events of the stream, and the deadline is checked later, at the next exchange, for works that are
not complete.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from patchpar.errors import ExchangeError


class StreamStall:
    """Measures how long the current stream waits between the construction of this and `end`."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._begin.record()

    def end(self) -> None:
        """End the measured interval."""
        self._end.record()

    def seconds(self, *, block: bool) -> float | None:
        """Return its duration; None while it lasts, unless `block`, which synchronises."""
        if block:
            self._end.synchronize()
        elif not self._end.query():  # type: ignore[no-untyped-call]
            return None
        return self._begin.elapsed_time(self._end) / 1e3


class StreamWaits:
    """Works that the current stream waits for. `deadline` returns the limit of one in seconds, which may change."""

    def __init__(self, deadline: Callable[[], float]) -> None:
        self._deadline = deadline
        self._awaited: deque[tuple[float, Sequence[dist.Work], Callable[[], str]]] = deque()

    def wait_for(self, works: Sequence[dist.Work], what: Callable[[], str]) -> StreamStall:
        """Make the stream wait. `what` names rank, exchange point, peers and shapes for the error."""
        stall = StreamStall()
        for work in works:
            work.wait()
        stall.end()
        self._awaited.append((time.monotonic(), tuple(works), what))
        return stall

    def look_back(self) -> None:
        """Raise ExchangeError for the first work that is not complete after the deadline."""
        while self._awaited:
            since, works, what = self._awaited[0]
            if not all(work.is_completed() for work in works):
                if time.monotonic() - since > self._deadline():
                    raise ExchangeError(f"{what()} within {self._deadline():g} s")
                return
            self._awaited.popleft()
