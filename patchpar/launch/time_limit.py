"""Limits of time: of ranks that wait for others, and of calls of libraries that wait without one."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from typing import TypeVar

T = TypeVar("T")

__all__ = ["TimedOut", "longest_wait", "time_limited"]
WAIT_TIMES = 300  # deadlines; a rank may wait this long for another one, which may compute for many of them


def time_limited(seconds: float, work: Callable[[], T], name: str) -> T:
    """Return what `work` returns in a thread called `name`. Raises TimedOut after so many seconds, and what it raises.

    The thread is not ended by that.
    """
    found = Future[T]()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by whoever waits
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found.result(seconds)


def longest_wait(deadline: float) -> float:
    """Return the seconds after which a rank itself stops waiting for another; its caller detects hangs much earlier.

    At most a week: system calls accept no longer timeouts.
    """
    return min(WAIT_TIMES * deadline, 7 * 24 * 3600.0)
