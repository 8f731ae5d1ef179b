"""Signals end a server as ctrl-C does, with cleanup."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def signals_unwind() -> Iterator[None]:
    """In the `with` block, SIGTERM (`docker stop`) and SIGHUP raise SystemExit(128 + number) in the main thread, once.

    Must be entered in the main thread. Signals that are ignored, as with nohup, stay ignored.
    """
    kept = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number for number, handler in kept.items() if handler is not signal.SIG_IGN]

    def leave(number: int, frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)  # a second one would interrupt the cleanup
        raise SystemExit(128 + number)

    for number in heeded:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, kept[number])
