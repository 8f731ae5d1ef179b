"""Ctrl-C and signals end a command or a server: with cleanup, and at once also where something computes.

    main thread runs Python      the signal unwinds it, which closes workers, files and pages
    main thread is in a kernel   Python handles no signal until it returns: `ended_at_once` exits instead
    another thread is in one     closing does not wait for it, and then `computation_abandoned` exits

Exiting is `os._exit`: an interpreter that is finalized while a thread computes may crash. Worker processes end with
this one, and anonymous shared memory with the last process that has it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
INTERRUPTED = 128 + signal.SIGINT
"""Exit code that shells expect after ctrl-C."""
SECONDS = 3.0
"""Time for the main thread to handle a signal."""
CLEANUP_SECONDS = 10.0
"""Time in which a further signal does not interrupt the cleanup; as long as `docker stop` waits."""
SHOW_CURSOR = "\x1b[?25h"
"""Undoes what a progress bar does to the cursor."""


@contextmanager
def signals_unwind() -> Iterator[None]:
    """In the `with` block, SIGTERM (`docker stop`) and SIGHUP raise SystemExit(128 + number) in the main thread.

    A further one within CLEANUP_SECONDS is ignored. A later one raises again, since Python loses an exception that a
    signal raises within a callback of its own, as while modules are imported. A block inside another one begins anew.
    Must be entered in the main thread. Signals that are ignored, as with nohup, stay ignored.
    """
    latest: list[float] = []

    def leave(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not latest or now > latest[-1] + CLEANUP_SECONDS:
            latest.append(now)
            raise SystemExit(128 + number)

    with _handled([number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN], leave):
        yield


@contextmanager
def signals_ignored() -> Iterator[None]:
    """In the `with` block ctrl-C, SIGTERM and SIGHUP do nothing: for a cleanup that is short. In the main thread."""
    with _handled([signal.SIGINT, *ENDING], signal.SIG_IGN):
        yield


@contextmanager
def _handled(numbers: list[signal.Signals], handler: Any) -> Iterator[None]:
    """In the `with` block these signals have another handler."""
    kept = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


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


@contextmanager
def computation_abandoned(is_computing: Callable[[], bool]) -> Iterator[None]:
    """Exit after a `with` block that ctrl-C or a signal has ended, if a thread of this process `is_computing` then."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as ending:
        if is_computing():
            abandon_computation(exit_code(ending))
        raise


def exit_code(ending: BaseException) -> int:
    """Return the exit code after a KeyboardInterrupt or SystemExit."""
    if isinstance(ending, SystemExit):
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    return INTERRUPTED


def abandon_computation(code: int, number: int | None = None) -> NoReturn:
    """Exit with `code`, whatever threads compute. `number`: of the signal, unless the code says it."""
    stderr, sentence = sys.stderr, ended_by(code - 128 if number is None else number)
    try:
        if stderr is not None:  # None: it was closed before the command
            cursor = SHOW_CURSOR if stderr.isatty() else ""
            stderr.write(f"{cursor}\n{sentence}, in the middle of a computation\n")
            stderr.flush()
    finally:  # also where nobody reads it any more, as with `2>&1 | tee`, which ctrl-C ends first
        os._exit(code)


def ended_by(number: int) -> str:
    """Return the sentence about a command that signal `number` has ended; it may be none, after another exit."""
    return f"ended by {signal.Signals(number).name}" if number in set(signal.Signals) else "ended"


def _watch(read: int, left: threading.Event) -> None:
    while number := int.from_bytes(os.read(read, 1), "big"):
        if number in (signal.SIGINT, *ENDING) and not left.wait(SECONDS):
            abandon_computation(128 + number)
