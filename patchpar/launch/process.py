"""One worker process, seen from the process that started it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from io import FileIO

from patchpar.errors import LaunchError
from patchpar.launch.anonymous_file import anonymous_file
from patchpar.launch.channel import Channel, ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.handshake import PACKAGE_ROOT
from patchpar.launch.heartbeat import HeartbeatReader
from patchpar.launch.messages import EncodedMessage
from patchpar.launch.worker_output import FirstPrinter, WorkerOutput

# Not "-m", which puts the working directory first on the path: a folder called torch there would be imported.
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from patchpar.launch.worker import main; main(int(sys.argv[2]))"
SEND_TIMEOUT = 10.0  # s; a worker's reader thread reads at once unless the process is stopped or stuck
LAST_OUTPUT_SECONDS = 0.5  # to read what a dead worker printed
POLL_SECONDS = 0.005  # between checks whether a worker has ended


class WorkerProcess:
    """A worker with its channel, output and heartbeat. The constructor starts the process."""

    def __init__(
        self, rank: int, device: str, *, environment: dict[str, str], speakers: FirstPrinter, inherit: tuple[int, ...]
    ) -> None:
        self.rank, self.device = rank, device
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            ours, end = socket.socketpair()
            heartbeat = FileIO(anonymous_file("patchpar-heartbeat"), "r+")
            (read_life, self._write_life), (read_output, write_output) = _pipe(), _pipe()
            for file in (end, heartbeat, read_life, write_output):
                theirs.enter_context(file)
            for file in (ours, self._write_life, read_output):
                undo.enter_context(file)
            # Descriptors have the same numbers in the worker.
            self.heartbeat_fd, self.lifeline_fd = heartbeat.fileno(), read_life.fileno()
            self.heartbeat = HeartbeatReader(self.heartbeat_fd)
            undo.callback(self.heartbeat.close)
            self.channel = Channel(ours, send_timeout=SEND_TIMEOUT)
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-c", BOOT, PACKAGE_ROOT, str(end.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=write_output,
                    stderr=write_output,
                    pass_fds=(end.fileno(), self.heartbeat_fd, self.lifeline_fd, *inherit),
                    env=environment,
                    start_new_session=True,  # the terminal's ctrl-C reaches the caller only, which ends the workers
                )
            except OSError as error:
                raise LaunchError(f"cannot start a worker with {sys.executable!r}: {error}") from error
            self._output = WorkerOutput(rank, read_output, speakers)
            undo.pop_all()

    def send_config(self, config: EncodedMessage) -> None:
        """Send the WorkerConfig as request 0. A worker that has died already is noticed by the RequestLoop."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self.channel.send(ChannelFrame(FrameKind.CONFIG, 0, config))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.device}, pid {self.pid})"

    def is_alive(self) -> bool:
        """Return whether the process is running. Does not reap it, so that its process group can still be killed."""
        return self._popen.returncode is None and not _has_ended(self._popen)

    def last_exchange_point(self) -> str:
        """Return the last exchange point that the worker reached, for error messages."""
        where = self.heartbeat.where
        return f"last exchange point {where!r}" if where else "before its first exchange point"

    def last_output(self) -> str:
        """Return the last lines that it printed, with a heading; empty if there are none."""
        tail = self._output.tail()
        return f"\nIts last output:\n{tail}" if tail else ""

    def dump_stack(self) -> None:
        """Make the worker print the stack of its main thread, if it can; `last_output` has it a moment later."""
        if self.is_alive():
            self._popen.send_signal(signal.SIGUSR1)

    def how_it_ended(self) -> str:
        """Return exit code or signal as text. Waits a moment for a process whose channel has just closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(time.monotonic() + LAST_OUTPUT_SECONDS)
        self._output.finish(LAST_OUTPUT_SECONDS)
        code = self._popen.returncode
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (perhaps the system ran out of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def ask_to_stop(self) -> None:
        """Send a STOP frame."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self.channel.send(ChannelFrame(FrameKind.STOP, 0))

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._popen.terminate()

    def kill(self) -> None:
        """Kill the worker and the processes that it has started; does not wait."""
        if self._popen.returncode is None:  # else another process group may have its id
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, give_up: float) -> bool:
        """Wait until it has ended or it is `give_up`; return whether it has. Processes it has started are killed."""
        while self.is_alive():
            if time.monotonic() >= give_up:
                return False
            time.sleep(POLL_SECONDS)
        self.kill()
        self._popen.wait()
        return True

    def let_go(self) -> None:
        """Close the channel and the lifeline, so that the worker exits. Idempotent."""
        self.channel.close()
        self._write_life.close()

    def release(self) -> None:
        """Close all descriptors of a worker that has ended. Idempotent."""
        self.let_go()
        self._output.finish(LAST_OUTPUT_SECONDS)


def _pipe() -> tuple[FileIO, FileIO]:
    """Return the read end and the write end of a pipe; each closes when it is deleted."""
    read, write = os.pipe()
    return FileIO(read, "r"), FileIO(write, "w")


def _has_ended(popen: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended, without reaping it where possible (macOS: from Python 3.13)."""
    if not hasattr(os, "waitid"):
        return popen.poll() is not None
    try:
        return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # already reaped
        return True
