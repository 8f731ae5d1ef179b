"""A command in a forked child, which has its main thread, so that signals end it as they end one in a shell.

It starts with all modules that this process has imported, in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

READY = b"ready\n"
SECONDS = 8.0  # until a command must have ended, on a loaded machine


def compute_for_ever(*_: Any, **__: Any) -> NoReturn:
    """Block as a kernel does, without the interpreter's lock, where Python handles no signal; print that it is ready.

    A mutex that is locked twice does this without using the processor.
    """
    threading.Timer(0.3, os.write, (1, READY)).start()
    mutex, library = ctypes.create_string_buffer(128), ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
    raise AssertionError("the mutex was free")


class ForkedCommand:
    """A child that runs. `pid`: its process id."""

    def __init__(self, pid: int, output: int, errors: Path) -> None:
        self.pid, self._output, self._errors = pid, output, errors
        self._code: int | None = None
        self.output = b""

    def wait_for(self, text: bytes = READY) -> None:
        """Until it has printed this on stdout."""
        while text not in self.output:
            read = os.read(self._output, 4096)
            assert read, f"it ended before: {self.errors()}"
            self.output += read

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def code(self, within: float = 20.0) -> int:
        """The exit code; minus the signal's number if one has killed it."""
        give_up = time.monotonic() + within
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                break
            assert time.monotonic() < give_up, f"it has not ended within {within:g} s: {self.errors()}"
            time.sleep(0.02)
        return self._code

    def ends_by(self, number: signal.Signals, code: int, within: float = SECONDS) -> None:
        """Send a signal, which has to end a computation within so many seconds, with this exit code and a sentence."""
        began = time.monotonic()
        self.send(number)
        assert self.code() == code, self.errors()
        assert time.monotonic() - began < within
        assert f"ended by {number.name}, in the middle of a computation" in self.errors()
        assert "Traceback" not in self.errors()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return os.waitpid(self.pid, os.WNOHANG)[0] == 0

    def errors(self) -> str:
        """What it has printed on stderr."""
        return self._errors.read_text()

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


@contextmanager
def forked(work: Callable[[], object], errors: Path) -> Iterator[ForkedCommand]:
    """Run `work` in a child, with stderr in the file `errors`; its exit code is that of a SystemExit, 0 without one."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run(work, write, errors)
    os.close(write)
    child = ForkedCommand(pid, read, errors)
    try:
        yield child
    finally:
        child.kill()
        os.close(read)


def _run(work: Callable[[], object], output: int, errors: Path) -> NoReturn:
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - the test sees it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
