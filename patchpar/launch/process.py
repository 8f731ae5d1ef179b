"""One worker process, as the process that started it sees it."""

from __future__ import annotations

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

# Not "-m": that would put the working directory first on the path, and a folder called torch there would be imported.
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from patchpar.launch.worker import main; main(int(sys.argv[2]))"
SEND_TIMEOUT = 10.0  # s; a worker's reader thread reads at once, so one that has not by then is stopped or stuck
LAST_WORDS = 0.5  # s to read what a dead worker printed
LOOK_SECONDS = 0.005  # between looks whether a worker has ended


class WorkerProcess:
    """A worker, its channel, its output and its beacon. Made running."""

    def __init__(
        self, rank: int, device: str, *, environment: dict[str, str], speakers: FirstPrinter, inherit: tuple[int, ...]
    ) -> None:
        self.rank, self.device = rank, device
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            ours, end = socket.socketpair()
            heartbeat = FileIO(anonymous_file("patchpar-beacon"), "r+")
            (read_life, self._write_life), (read_output, write_output) = _pipe(), _pipe()
            for file in (end, heartbeat, read_life, write_output):
                theirs.enter_context(file)
            for file in (ours, self._write_life, read_output):
                undo.enter_context(file)
            # The numbers they have in the worker.
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
                    start_new_session=True,  # the terminal's ctrl-C is for us; we end the workers
                )
            except OSError as error:
                raise LaunchError(f"cannot start a worker with {sys.executable!r}: {error}") from error
            self._output = WorkerOutput(rank, read_output, speakers)
            undo.pop_all()

    def greet(self, config: EncodedMessage) -> None:
        """Say the hello, which is request 0. If it has died already, the dialogue will find out."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self.channel.send(ChannelFrame(FrameKind.CONFIG, 0, config))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.device}, pid {self.pid})"

    def is_alive(self) -> bool:
        """Whether the process has not ended. One that has is not reaped by this: its group can still be told by it."""
        return self._popen.returncode is None and not _has_ended(self._popen)

    def last_exchange_point(self) -> str:
        """Where it was last, in words."""
        where = self.heartbeat.where
        return f"last seam {where!r}" if where else "before its first seam"

    def last_output(self) -> str:
        """The last lines it printed, introduced; empty if there are none."""
        tail = self._output.tail()
        return f"\nIts last output:\n{tail}" if tail else ""

    def dump_stack(self) -> None:
        """Have it print where its threads are, if it can; shown by `last_output` a moment later."""
        if self.is_alive():
            self._popen.send_signal(signal.SIGUSR1)

    def how_it_ended(self) -> str:
        """Exit code or signal, in words. Waits a moment for an end that has only just shown in the channel."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(time.monotonic() + LAST_WORDS)
        self._output.finish(LAST_WORDS)
        code = self._popen.returncode
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (perhaps the system ran out of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def ask_to_stop(self) -> None:
        """Ask politely."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self.channel.send(ChannelFrame(FrameKind.STOP, 0))

    def terminate(self) -> None:
        """Ask firmly."""
        self._popen.terminate()

    def kill(self) -> None:
        """End it at once, and the processes that it has started; does not wait."""
        if self._popen.returncode is None:  # else its number may be that of another group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, give_up: float) -> bool:
        """Wait until it has ended, or `time.monotonic()` reaches `give_up`. Whether it has ended.

        The processes that it has started end with it.
        """
        while self.is_alive():
            if time.monotonic() >= give_up:
                return False
            time.sleep(LOOK_SECONDS)
        self.kill()
        self._popen.wait()
        return True

    def let_go(self) -> None:
        """Close our ends of what tells it that we are here, upon which it ends. Harmless when done twice."""
        self.channel.close()
        self._write_life.close()

    def release(self) -> None:
        """Close what this process holds of it, when it has ended. Harmless when done twice."""
        self.let_go()
        self._output.finish(LAST_WORDS)


def _pipe() -> tuple[FileIO, FileIO]:
    """The end to read and the end to write, closed when they are dropped."""
    read, write = os.pipe()
    return FileIO(read, "r"), FileIO(write, "w")


def _has_ended(popen: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended, without reaping it where that can be: macOS cannot before Python 3.13."""
    if not hasattr(os, "waitid"):
        return popen.poll() is not None
    try:
        return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else has reaped it
        return True
