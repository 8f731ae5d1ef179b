"""One worker process, seen from the process that started it."""

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from patchpar.errors import LaunchError
from patchpar.launch.anonymous_file import anonymous_file
from patchpar.launch.channel import SEND_TIMEOUT, Channel, ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.heartbeat import HeartbeatReader
from patchpar.launch.messages import EncodedMessage
from patchpar.launch.started_process import POLL_SECONDS, ProcessRequest, StartedProcess, Starter, ending
from patchpar.launch.worker_output import FirstPrinter, WorkerOutput

LAST_OUTPUT_SECONDS = 0.5  # to read what a dead worker printed
HAS_WORK = ("R", "D")
"""States of a process in /proc: on a core or in the queue for one; waiting for a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """How all workers of a pool are started: see ProcessRequest. `speakers`: which of them printed a line first."""

    starter: Starter
    environment: dict[str, str]
    path: tuple[str, ...]
    modules: tuple[str, ...]
    speakers: FirstPrinter


class ProcessWork:
    """What a process that is being started does: it computes, or waits for a core or for a disk."""

    def __init__(self) -> None:
        self.process: StartedProcess | None = None
        self._ticks = 0

    def has_grown(self) -> bool:
        """Return whether the process has worked since the last question, or does not exist yet.

        On a busy machine it may get no core for seconds, although it has work.
        """
        if self.process is None:
            return False
        if (pid := self.process.pid) is None:
            return self.process.is_alive()
        before = self._ticks
        self._ticks, has_work = process_state(pid)
        return has_work or self._ticks > before


class WorkerProcess:
    """A worker with its channel, output and heartbeat. The constructor starts the process. Raises LaunchError."""

    def __init__(self, rank: int, device: str, start: WorkerStart, inherit: tuple[int, ...]) -> None:
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
            work = ProcessWork()  # an object of its own: with `self`, descriptors would be closed by the collector only
            self.channel = Channel(ours, send_timeout=SEND_TIMEOUT, is_working=work.has_grown)
            self._process = work.process = start.starter(
                ProcessRequest(
                    channel=end.fileno(),
                    output=write_output.fileno(),
                    inherit=(self.heartbeat_fd, self.lifeline_fd, *inherit),
                    environment=start.environment,
                    path=start.path,
                    modules=start.modules,
                )
            )
            self._output = WorkerOutput(rank, read_output, start.speakers)
            undo.pop_all()

    def send_config(self, config: EncodedMessage) -> None:
        """Send the WorkerConfig as request 0. A worker that has died already is noticed by the RequestLoop."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self.channel.send(ChannelFrame(FrameKind.CONFIG, 0, config))

    def wait_for_pid(self, give_up: float) -> int:
        """Return the process id, which is known once the process exists. Raises LaunchError if it is `give_up`."""
        while (pid := self._process.pid) is None:
            if not self._process.is_alive():
                raise LaunchError(f"{self} {self.how_it_ended()}{self.last_output()}")
            if time.monotonic() >= give_up:
                raise LaunchError(f"{self} has not been started yet{self.last_output()}")
            time.sleep(POLL_SECONDS)
        return pid

    def __str__(self) -> str:
        pid = self._process.pid
        return f"rank {self.rank} ({self.device}{'' if pid is None else f', pid {pid}'})"

    def is_alive(self) -> bool:
        """Return whether the process is running. Does not reap it, so that its process group can still be killed."""
        return self._process.is_alive()

    def last_exchange_point(self) -> str:
        """Return the last exchange point that the worker reached, for error messages."""
        where = self.heartbeat.where
        return f"last exchange point {where!r}" if where else "before its first exchange point"

    def last_output(self) -> str:
        """Return the last lines that it printed, with a heading; empty if there are none."""
        tail = self._output.tail() or self._process.last_output()
        return f"\nIts last output:\n{tail}" if tail else ""

    def dump_stack(self) -> None:
        """Make the worker print the stack of its main thread, if it can; `last_output` has it a moment later."""
        if self.is_alive():
            self._process.dump_stack()

    def how_it_ended(self) -> str:
        """Return exit code or signal as text. Waits a moment for a process whose channel has just closed."""
        self.wait(time.monotonic() + LAST_OUTPUT_SECONDS)
        self._output.finish(LAST_OUTPUT_SECONDS)
        code = self._process.returncode
        return self._process.unknown_end() if code is None else ending(code)

    def ask_to_stop(self) -> None:
        """Send a STOP frame."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self.channel.send(ChannelFrame(FrameKind.STOP, 0))

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the worker and the processes that it has started; does not wait."""
        self._process.kill()

    def wait(self, give_up: float) -> bool:
        """Wait until it has ended or it is `give_up`; return whether it has. Processes it has started are killed."""
        while self.is_alive():
            if (left := give_up - time.monotonic()) <= 0:
                return False
            self._process.wait(left)
        self.kill()
        self._process.reap()
        return True

    def after_fork(self) -> None:
        """In a forked child of the caller: close copied descriptors."""
        self.let_go()
        self._process.close_in_child()

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


def process_state(pid: int) -> tuple[int, bool]:
    """Return the processor time of a process in ticks, and whether it runs, or waits for a core or a disk, now.

    0 and False if it has ended, or where the system does not tell.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may contain spaces
    except OSError:
        return 0, False
    return int(fields[11]) + int(fields[12]), fields[0] in HAS_WORK  # ticks of the user and of the system
