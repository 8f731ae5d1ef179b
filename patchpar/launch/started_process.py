"""How worker processes are started: what each needs, what its starter can do with it, and the plain way, exec."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from patchpar.errors import LaunchError
from patchpar.launch.handshake import python_command

WORKER = "patchpar.launch.worker"
POLL_SECONDS = 0.005  # between checks whether a process is there, or has ended, that cannot be waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRequest:
    """A worker process to start.

    Descriptors: `channel` and `inherit` have the same numbers in the worker, `output` becomes its stdout and stderr.
    `path`: where `modules` are looked for, which the worker will import in this order.
    """

    channel: int
    output: int
    inherit: tuple[int, ...]
    environment: dict[str, str]
    path: tuple[str, ...]
    modules: tuple[str, ...]


class StartedProcess(Protocol):
    """A worker process, whose id is not used again before `reap`."""

    @property
    def pid(self) -> int | None:
        """The process id; None as long as the process does not exist yet."""

    @property
    def returncode(self) -> int | None:
        """After `reap`: the exit code, or the negative number of the signal that ended it; None if it is unknown."""

    def is_alive(self) -> bool:
        """Return whether it is running, or is still to be started."""

    def wait(self, seconds: float) -> None:
        """Wait until it may have ended, so many seconds at most."""

    def dump_stack(self) -> None:
        """Make the process print its stack: the worker's own, or of what it has to wait for."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Kill the process and those of its process group; does not wait. No effect after `reap`."""

    def reap(self) -> None:
        """Collect the exit status of a process that has ended. Idempotent."""

    def close_in_child(self) -> None:
        """In a forked child of the caller: close copied descriptors, without any effect on the process."""

    def unknown_end(self) -> str:
        """Return what is known of an end without a returncode, to follow the name of the worker."""

    def last_output(self) -> str:
        """Return the last lines that were printed before there was a worker to print them."""


Starter = Callable[[ProcessRequest], StartedProcess]


class FreshProcess:
    """A worker in a Python process of its own. The constructor starts it. Raises LaunchError."""

    def __init__(self, request: ProcessRequest) -> None:
        try:
            self._popen = subprocess.Popen(
                python_command(WORKER, request.channel),
                stdin=subprocess.DEVNULL,
                stdout=request.output,
                stderr=request.output,
                pass_fds=(request.channel, *request.inherit),
                env=request.environment,
                start_new_session=True,  # the terminal's ctrl-C reaches the caller only, which ends the workers
            )
        except OSError as error:
            raise cannot_start(error) from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def is_alive(self) -> bool:
        return self._popen.returncode is None and not _has_ended(self._popen)

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))

    def dump_stack(self) -> None:
        self._send(signal.SIGUSR1)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self._popen.returncode is None:  # Popen.send_signal would reap it: its group could not be killed any more
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        if self._popen.returncode is None:  # else another process group may have its id
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        self._popen.wait()

    def close_in_child(self) -> None:
        """Nothing is open."""

    def unknown_end(self) -> str:
        return "closed its connection"

    def last_output(self) -> str:
        return ""


def cannot_start(error: OSError) -> LaunchError:
    """Return the error of a Python process that the system does not start."""
    return LaunchError(f"cannot start a worker with {sys.executable!r}: {error}")


def ending(code: int) -> str:
    """Return how a process has ended, as text. `code`: see StartedProcess.returncode."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (perhaps the system ran out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _has_ended(popen: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended, without reaping it where possible (macOS: from Python 3.13)."""
    if not hasattr(os, "waitid"):
        return popen.poll() is not None
    try:
        return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # already reaped
        return True
