"""End a command by ctrl-C or a signal, without leaving workers running or files incomplete.

The signals unwind the main thread, which closes workers, videos and pages. While that thread is inside a kernel, Python
handles no signal until the kernel returns; `ended_at_once` is for that case.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from patchpar.stream.web.shutdown import ENDING, signals_unwind

INTERRUPTED = 128 + signal.SIGINT
"""Exit code that shells expect after ctrl-C."""
SECONDS = 3.0
"""Time for the main thread to handle a signal."""
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let termination signals unwind the main thread, as ctrl-C does. The exit code is 128 + signal number."""
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
    """End this process by ctrl-C and termination signals also while the main thread cannot handle them.

    Use it only where nothing is open that has to be closed, since the process exits at once. Does nothing outside the
    main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    left = threading.Event()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # a signal writes its number, also inside a kernel
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
