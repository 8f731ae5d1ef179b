"""A call that may never return, as of torch that waits for other processes: made by a thread, up to a limit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T], name: str = "patchpar-connect") -> T:
    """Return what `work` returns on a thread called `name`. Raises concurrent.futures.TimeoutError, and what it raises.

    After the limit the thread goes on by itself, and ends with this process.
    """
    found = Future[T]()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again by whoever waits
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found.result(seconds)
