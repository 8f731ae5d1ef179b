"""A template process, seen from the process that starts it, and the workers that it forks."""

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from io import FileIO
from pathlib import Path

from patchpar.launch.fork_guard import change_in_children
from patchpar.launch.fork_request import (
    ForkRequest,
    TemplateEnded,
    receive_report,
    report_sockets,
    send_request,
)
from patchpar.launch.handshake import python_command
from patchpar.launch.started_process import POLL_SECONDS, ProcessRequest, cannot_start, ending
from patchpar.launch.template_process import VARY
from patchpar.launch.worker_output import FirstPrinter, WorkerOutput

MODULE = "patchpar.launch.template_process"
REPORT_SECONDS = 2.0  # for a template to say how a worker has ended: at once, unless it is stopped
LONGEST_POLL = 0.1
TO_PROCESS_GROUP = 4  # PIDFD_SIGNAL_PROCESS_GROUP, from Linux 6.9
log = logging.getLogger(__name__)


class Template:
    """A template process. The constructor starts it; it ends after `idle_seconds` without a worker of it.

    Raises LaunchError.
    """

    def __init__(self, environment: dict[str, str], idle_seconds: int) -> None:
        self._users: weakref.WeakSet[ForkedProcess] = weakref.WeakSet()
        self.is_retired = False
        self._explained: set[str] = set()
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            self._requests, end = socket.socketpair()
            (read_life, write_life), (read_output, write_output) = os.pipe(), os.pipe()
            self._write_life, output = FileIO(write_life, "w"), FileIO(read_output)
            for file in (end, FileIO(read_life), FileIO(write_output, "w")):
                theirs.enter_context(file)
            for file in (self._requests, self._write_life, output):
                undo.enter_context(file)
            try:
                self._popen = subprocess.Popen(
                    python_command(MODULE, end.fileno(), read_life, idle_seconds),
                    stdin=subprocess.DEVNULL,
                    stdout=write_output,
                    stderr=write_output,
                    pass_fds=(end.fileno(), read_life),
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise cannot_start(error) from error
            undo.pop_all()
        self._output = WorkerOutput(0, output, FirstPrinter(), at_end=self._finish)
        change_in_children(self)

    @property
    def pid(self) -> int:
        """The process id of the template."""
        return self._popen.pid

    @property
    def is_used(self) -> bool:
        """Whether it has workers, or is to start some."""
        return bool(self._users)

    def fork(self, request: ProcessRequest) -> "ForkedProcess":
        """Ask for a worker. Returns before there is one. Raises TemplateEnded."""
        numbers = (request.channel, *request.inherit)
        varying = {name: value for name, value in request.environment.items() if name in VARY}
        message = ForkRequest(numbers=numbers, path=request.path, modules=request.modules, environment=varying)
        ours, theirs = report_sockets()
        worker = ForkedProcess(self, ours)
        with theirs:
            self._users.add(worker)  # first, or it would be ended as unused if another thread retires it meanwhile
            try:
                self._send(message, [theirs.fileno(), request.output, *numbers])
            except BaseException:
                ours.close()
                self._users.discard(worker)
                self.retire()
                raise
        return worker

    def _send(self, message: ForkRequest, descriptors: list[int]) -> None:
        """Send a request with the working directory. Raises TemplateEnded."""
        if self.is_retired or self._requests.fileno() < 0:
            raise TemplateEnded("it has ended")
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            send_request(self._requests, message, [descriptors[0], folder, *descriptors[1:]])
        except BaseException:
            self._requests.close()  # a part of the request may have been sent
            raise
        finally:
            os.close(folder)

    def leave(self, worker: "ForkedProcess") -> None:
        """Forget a worker that has ended."""
        self._users.discard(worker)
        if self.is_retired:
            self._end_if_unused()

    def retire(self) -> None:
        """Ask for no more workers; end it now, or with the last of its workers."""
        self.is_retired = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self._users:
            self.close()  # the kernel kills it: it may be in an import that never ends

    def explain(self, unfit: str) -> None:
        """Log, once, why workers are not forked from this template but started as new Python processes."""
        if unfit and unfit not in self._explained:
            self._explained.add(unfit)
            log.warning("workers are started as new Python processes, which takes longer: %s", unfit)

    def dump_stack(self) -> None:
        """Make it print its stack; `last_output` has it a moment later."""
        self._popen.send_signal(signal.SIGUSR1)

    def last_output(self) -> str:
        """Return the last lines that it printed."""
        return self._output.tail()

    def how_it_ended(self) -> str:
        """Return exit code or signal as text."""
        self._output.finish(REPORT_SECONDS)
        code = self._popen.returncode
        return "closed its connection" if code is None else ending(code)

    def _finish(self) -> None:
        """When it has ended, in the thread that reads its output: reap it."""
        self._popen.wait()
        self.close()

    def close(self) -> None:
        """Close the connection and the lifeline, so that it ends. Idempotent."""
        self._requests.close()
        self._write_life.close()

    def after_fork(self) -> None:
        self.close()


class ForkedProcess:
    """A worker that a template forks. Thread-safe."""

    def __init__(self, template: Template, report: socket.socket) -> None:
        self._template, self._report = template, report
        self._lock = threading.RLock()
        self._pid: int | None = None
        self._process: FileIO | None = None  # pidfd
        self._code: int | None = None
        self._error = ""
        self._is_lost = False  # the template has ended
        self._is_reaped = False

    @property
    def pid(self) -> int | None:
        self._read()
        return self._pid

    @property
    def returncode(self) -> int | None:
        return self._code

    def is_alive(self) -> bool:
        with self._lock:
            self._read()
            if self._is_reaped or self._error:
                return False
            if self._process is None:
                return not self._is_lost
            return not _is_readable(self._process, 0.0)

    def wait(self, seconds: float) -> None:
        with self._lock:
            self._read()
            process = self._process
        if process is None:
            time.sleep(min(seconds, POLL_SECONDS))
            return
        with contextlib.suppress(OSError, ValueError):  # another thread has reaped it, and closed this
            _is_readable(process, min(seconds, LONGEST_POLL))  # which a poll that has begun does not notice

    def dump_stack(self) -> None:
        if self.pid is None:
            self._template.dump_stack()
        else:
            self._send(signal.SIGUSR1)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """See StartedProcess. A worker that does not exist yet will not: its template takes too long, and is left."""
        with self._lock:
            self._read()
            if self._is_reaped:
                return
            if self._pid is None or self._process is None:
                self._let_go()
                self._template.retire()
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                try:
                    signal.pidfd_send_signal(self._process.fileno(), signal.SIGKILL, None, TO_PROCESS_GROUP)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._kill_group_by_id(self._pid)
            self._send(signal.SIGKILL)  # it may not lead its group yet

    def _kill_group_by_id(self, pid: int) -> None:
        """Before Linux 6.9: the id belongs to the worker, or to its group alone, or may be another process's by now."""
        if not self._is_lost or self.is_alive() or not Path(f"/proc/{pid}").exists():
            os.killpg(pid, signal.SIGKILL)

    def reap(self) -> None:
        with self._lock:
            if self._is_reaped or self.is_alive():
                return
            give_up = time.monotonic() + REPORT_SECONDS
            while self._pid is not None and self._code is None and not self._is_lost and time.monotonic() < give_up:
                _is_readable(self._report, give_up - time.monotonic())
                self._read()
            self._let_go()

    def close_in_child(self) -> None:
        self._report.close()
        if self._process is not None:
            self._process.close()

    def unknown_end(self) -> str:
        if self._error:
            return f"could not be started: {self._error}"
        if not self._is_lost:
            return "closed its connection"
        end = f"its template process (pid {self._template.pid}) {self._template.how_it_ended()}"
        if self._pid is None:
            return f"could not be started: {end}"
        return f"has ended, it is unknown how, because {end}"

    def last_output(self) -> str:
        return self._template.last_output() if self._pid is None else ""

    def _read(self) -> None:
        """Take in what the template has reported."""
        with self._lock:
            while not (self._is_lost or self._is_reaped):
                try:
                    found = receive_report(self._report)
                except BlockingIOError:
                    return
                if found is None:
                    self._is_lost = True
                    return
                report, descriptors = found
                self._error = self._error or report.error
                self._code = report.code if report.code is not None else self._code
                if report.pid is not None:
                    self._pid, self._process = report.pid, FileIO(descriptors[0])
                    self._template.explain(report.unfit)

    def _send(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._process is not None and not self._process.closed:
                signal.pidfd_send_signal(self._process.fileno(), number)

    def _let_go(self) -> None:
        """Let the template reap the process, so that its id may be used again."""
        self._is_reaped = True
        self._report.close()
        if self._process is not None:
            self._process.close()
        self._template.leave(self)


def _is_readable(file: FileIO | socket.socket, seconds: float) -> bool:
    """Return whether a descriptor is or becomes readable: of a process (pidfd), that it has ended."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, seconds)))
