"""One worker process, as the process that started it sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from patchpar.anonymous import anonymous_file
from patchpar.errors import LaunchError
from patchpar.launch.beacon import BeaconReader
from patchpar.launch.channel import Channel, Closed, Frame, Kind
from patchpar.launch.hello import PACKAGE_ROOT
from patchpar.launch.output import FirstSpeaker, Output
from patchpar.launch.wire import Message

# Not "-m": that would put the working directory first on the path, and a folder called torch there would be imported.
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from patchpar.launch.worker import main; main(int(sys.argv[2]))"
SEND_TIMEOUT = 10.0  # s; a worker's reader thread reads at once, so one that has not by then is stopped or stuck
LAST_WORDS = 0.5  # s to read what a dead worker printed


class WorkerProcess:
    """A worker, its channel, its output and its beacon. Made running."""

    def __init__(
        self, rank: int, device: str, *, environment: dict[str, str], speakers: FirstSpeaker, inherit: tuple[int, ...]
    ) -> None:
        self.rank, self.device = rank, device
        ours, theirs = socket.socketpair()
        beacon = anonymous_file("patchpar-beacon")
        read_life, write_life = os.pipe()
        self._write_life: int | None = write_life
        read_output, write_output = os.pipe()
        self.beacon_fd, self.lifeline_fd = beacon, read_life  # the numbers they have in the worker
        self.beacon = BeaconReader(beacon)
        self.channel = Channel(ours, send_timeout=SEND_TIMEOUT)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", BOOT, PACKAGE_ROOT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=write_output,
                stderr=write_output,
                pass_fds=(theirs.fileno(), beacon, read_life, *inherit),
                env=environment,
                start_new_session=True,  # the terminal's ctrl-C is for us; we end the workers
            )
        except OSError as error:
            raise LaunchError(f"cannot start a worker with {sys.executable!r}: {error}") from error
        finally:
            theirs.close()
            for fd in (beacon, read_life, write_output):
                os.close(fd)
        self._output = Output(rank, read_output, speakers)

    def greet(self, hello: Message) -> None:
        """Say the hello, which is request 0. If it has died already, the dialogue will find out."""
        with contextlib.suppress(Closed, TimeoutError):
            self.channel.send(Frame(Kind.HELLO, 0, hello))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.device}, pid {self.pid})"

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._popen.poll() is None

    def last_seam(self) -> str:
        """Where it was last, in words."""
        where = self.beacon.where
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
            self._popen.wait(LAST_WORDS)
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
        with contextlib.suppress(Closed, TimeoutError):
            self.channel.send(Frame(Kind.STOP, 0))

    def terminate(self) -> None:
        """Ask firmly."""
        self._popen.terminate()

    def kill(self) -> None:
        """End it at once; does not wait."""
        self._popen.kill()

    def wait(self, give_up: float) -> bool:
        """Wait until it has ended, or `time.monotonic()` reaches `give_up`. Whether it has ended."""
        try:
            self._popen.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def let_go(self) -> None:
        """Close our ends of what tells it that we are here, upon which it ends. Harmless when done twice."""
        self.channel.close()
        descriptor, self._write_life = self._write_life, None
        if descriptor is not None:
            os.close(descriptor)

    def release(self) -> None:
        """Close what this process holds of it; to be called once, when it has ended."""
        self.let_go()
        self._output.finish(LAST_WORDS)
