"""A limit of time for calls of libraries that wait without one."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimedOut
from typing import TypeVar

T = TypeVar("T")

__all__ = ["TimedOut", "time_limited"]


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
