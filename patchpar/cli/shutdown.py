"""How a command ends before its time: ctrl-C, and signals that ask it to end, leave nothing running and nothing half.

They unwind the main thread, so that whatever is open is closed: workers, videos, pages. Where that thread is inside a
kernel it does not hear of them before the kernel returns; `ended_at_once` sees to that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from patchpar.stream.web.shutdown import ENDING, signals_unwind

INTERRUPTED = 128 + signal.SIGINT
"""What a shell expects of a command that ctrl-C has ended."""
SECONDS = 3.0
"""For the main thread to hear of a signal."""
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While inside, a signal that asks to end closes what is open, as ctrl-C does. The exit code is 128 + number."""
    with signals_unwind():
        try:
            yield
        except KeyboardInterrupt:
            typer.echo(_words(signal.SIGINT), err=True)
            raise typer.Exit(INTERRUPTED) from None
        except SystemExit as ending:
            if isinstance(ending.code, int) and ending.code - 128 in ENDING:
                typer.echo(_words(ending.code - 128), err=True)
            raise


@contextmanager
def ended_at_once() -> Iterator[None]:
    """While inside, ctrl-C and the like end this process also when the main thread cannot hear of them.

    To be entered where nothing is open that would have to be closed: the process is gone then, as it is. Outside of the
    main thread it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    left = threading.Event()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # written to when a signal comes, wherever we are
    watch = threading.Thread(target=_watch, args=(read, left), name="patchpar-ending", daemon=True)
    watch.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(write)
        watch.join()
        os.close(read)


def _watch(read: int, left: threading.Event) -> None:
    while number := int.from_bytes(os.read(read, 1), "big"):
        if number in (signal.SIGINT, *ENDING) and not left.wait(SECONDS):
            cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
            sys.stderr.write(f"{cursor}\n{_words(number)}, in the middle of a computation\n")
            sys.stderr.flush()
            os._exit(128 + number)


def _words(number: int) -> str:
    return f"ended by {signal.Signals(number).name}"
