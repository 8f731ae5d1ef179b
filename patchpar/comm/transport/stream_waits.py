"""Waiting for NCCL: the stream of the GPU stands until the messages are there, and the process goes on.

Given a timeout, a work of NCCL has the *process* wait, which asks every millisecond whether it is done and meanwhile
hands the GPU nothing to do: at a hundred exchanges in a step that would cost more than they do. So works are awaited
without one. What they took is read from two events of the stream, and the deadline is kept by looking back at whatever
has been awaited and is not done.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from patchpar.errors import ExchangeError


class StreamStall:
    """How long the current stream stands for what is enqueued between the making of this and `end`."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._begin.record()

    def end(self) -> None:
        """What comes after this is not waited for."""
        self._end.record()

    def seconds(self, *, block: bool) -> float | None:
        """How long it stood; None while it does, unless to `block` until that is known."""
        if block:
            self._end.synchronize()
        elif not self._end.query():  # type: ignore[no-untyped-call]
            return None
        return self._begin.elapsed_time(self._end) / 1e3


class StreamWaits:
    """Works that the current stream waits for. `deadline`: seconds that one may take, asked for whenever it counts."""

    def __init__(self, deadline: Callable[[], float]) -> None:
        self._deadline = deadline
        self._awaited: deque[tuple[float, Sequence[dist.Work], Callable[[], str]]] = deque()

    def wait_for(self, works: Sequence[dist.Work], what: Callable[[], str]) -> StreamStall:
        """Have the stream wait. `what`: says rank, seam, peers and shapes, for the error if they never come."""
        stall = StreamStall()
        for work in works:
            work.wait()
        stall.end()
        self._awaited.append((time.monotonic(), tuple(works), what))
        return stall

    def look_back(self) -> None:
        """Raise ExchangeError for the first that is not done, once it has had its time since it was awaited."""
        while self._awaited:
            since, works, what = self._awaited[0]
            if not all(work.is_completed() for work in works):
                if time.monotonic() - since > self._deadline():
                    raise ExchangeError(f"{what()} within {self._deadline():g} s")
                return
            self._awaited.popleft()
