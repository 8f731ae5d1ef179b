"""The main program of a template process: it imports what workers import, once, and forks them on request.

It has one thread, no device and no descriptors but its own, so that a fork of it is what a new worker would be after
its imports. Where an import leaves a thread or a descriptor behind, the worker becomes a new Python process by exec
instead, and the report says why.

A worker that has ended is not reaped until the caller closes its report socket: until then nobody else has its id.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from patchpar.launch.fork_request import ForkRequest, WorkerReport, receive_request, send_report
from patchpar.launch.handshake import python_command
from patchpar.launch.started_process import WORKER
from patchpar.launch.worker import die_with_parent, exit_at_once
from patchpar.launch.worker import main as run_worker

STANDARD = (0, 1, 2)
SETTLE_SECONDS = 1.0  # for a thread that has been joined to leave /proc
VARY = frozenset({"PYTEST_CURRENT_TEST"})
"""Variables that change within a program, and that no library reads while it is imported: sent with each request."""


def main(requests: int, lifeline: int, idle_seconds: int) -> None:
    """Serve requests, which arrive at descriptor `requests`, and end the process; in each fork of it, be the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starting process handles ctrl-C
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    die_with_parent(lifeline)
    template = TemplateProcess(socket.socket(fileno=requests), lifeline, idle_seconds)
    worker = template.serve()
    if worker is not None:
        worker.run()
    atexit._run_exitfuncs()
    exit_at_once(0)  # at its own end Python would report what gc.freeze() keeps as leaks, as nanobind prints them


@dataclass(slots=True)
class ForkedChild:
    """A worker, seen from the template."""

    pid: int
    report: socket.socket
    has_ended: bool = False
    is_let_go: bool = False
    is_reaped: bool = False

    def look(self) -> None:
        """Report the end of the worker, once, and reap it if the caller has let it go."""
        if not self.has_ended:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                self.has_ended = True
                code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                send_report(self.report, WorkerReport(code=code))
        if self.has_ended and self.is_let_go and not self.is_reaped:
            self.is_reaped = True
            os.waitpid(self.pid, 0)

    def let_go(self) -> None:
        """The caller needs it no more: kill it if it runs, and reap it."""
        self.report.close()
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):  # a worker that does not lead a group yet
                os.killpg(self.pid, signal.SIGKILL)
            os.kill(self.pid, signal.SIGKILL)
        self.is_let_go = True  # only now: the handler of SIGCHLD may reap it from here on, and its id be another's
        self.look()


@dataclass(frozen=True, slots=True)
class NewWorker:
    """In a forked child: the worker that it becomes. Descriptors: working directory, output, and those of `request`."""

    request: ForkRequest
    descriptors: tuple[int, ...]
    sigchld: signal.Handlers
    unfit: str

    def run(self) -> None:
        """Take the worker's descriptors, environment and session; then be the worker until it ends."""
        signal.signal(signal.SIGCHLD, self.sigchld)
        os.setsid()
        folder, output, *others = self.descriptors
        os.fchdir(folder)
        assign_descriptors(dict(zip((1, 2, *self.request.numbers), (output, output, *others), strict=True)))
        for name in VARY:
            os.environ.pop(name, None)
        os.environ.update(self.request.environment)
        channel = self.request.numbers[0]
        command = python_command(WORKER, channel)
        if self.unfit:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored in every Python process
                signal.signal(number, signal.SIG_DFL)
            os.execv(command[0], command)
        sys.argv[:] = ["-c", *command[3:]]
        sys.orig_argv[:] = command
        importlib.invalidate_caches()
        _reseed()
        run_worker(channel)


class TemplateProcess:
    """Imports, forks, and reports how workers have ended."""

    def __init__(self, requests: socket.socket, lifeline: int, idle_seconds: float) -> None:
        requests.set_inheritable(False)
        os.set_inheritable(lifeline, False)
        self._requests, self._lifeline, self._idle_seconds = requests, lifeline, idle_seconds
        self._is_open = True
        self._children: list[ForkedChild] = []
        self._imported: set[str] = set()
        self._unfit = ""
        found = signal.signal(signal.SIGCHLD, self._look)
        self._sigchld = found if isinstance(found, signal.Handlers) else signal.SIG_DFL

    def serve(self) -> NewWorker | None:
        """Serve requests until the caller closes the connection, or none comes and no worker runs for a while.

        Returns None then, and in each forked child the worker that it becomes.
        """
        while self._is_open or self._children:
            ready = self._wait()
            for child in self._children:
                if child.report in ready:
                    child.let_go()
            self._children = [child for child in self._children if not child.is_reaped]
            if self._requests in ready:
                found = receive_request(self._requests)
                self._is_open = found is not None
                worker = self._start(*found) if found is not None else None
                if worker is not None:
                    return worker
            if not ready and not self._children:
                self._requests.shutdown(socket.SHUT_RD)  # requests that were sent before are still received
        return None

    def _wait(self) -> list[socket.socket]:
        """Return the sockets with something to read; empty if nothing happens for the idle time."""
        sockets = [child.report for child in self._children if not child.is_let_go]
        if self._is_open:
            sockets.append(self._requests)
        by_number = {sock.fileno(): sock for sock in sockets}
        poll = select.poll()
        for number in by_number:
            poll.register(number, select.POLLIN)
        return [by_number[number] for number, _ in poll.poll(1000 * self._idle_seconds)]

    def _look(self, _number: int, _frame: FrameType | None) -> None:
        """The handler of SIGCHLD: also while modules are imported, callers learn at once how workers have ended."""
        for child in self._children:
            child.look()

    def _start(self, request: ForkRequest, descriptors: list[int]) -> NewWorker | None:
        """Fork a worker, unless the caller has let it go already. Returns it in the child, None in the template."""
        report = socket.socket(fileno=descriptors[0])
        pid: int | None = None
        self._import(request, descriptors)
        if not _is_closed(report):
            try:
                pid = os.fork()
            except OSError as error:
                send_report(report, WorkerReport(error=str(error)))
        if pid == 0:
            self._close()
            report.close()
            return NewWorker(request, tuple(descriptors[1:]), self._sigchld, self._unfit)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        if pid is None:
            report.close()
        else:
            self._adopt(ForkedChild(pid, report))
        return None

    def _close(self) -> None:
        """In a forked child: close the descriptors of the template."""
        self._requests.close()
        for child in self._children:
            child.report.close()

    def _adopt(self, child: ForkedChild) -> None:
        process = os.pidfd_open(child.pid)
        send_report(child.report, WorkerReport(pid=child.pid, unfit=self._unfit), (process,))
        os.close(process)
        self._children.append(child)
        child.look()  # it may have ended before it was in the list

    def _import(self, request: ForkRequest, descriptors: list[int]) -> None:
        """Import what the worker will import. What cannot be imported, the worker reports."""
        wanted = [name for name in request.modules if name not in self._imported]
        if not wanted:
            return
        sys.path[:] = request.path
        self._imported.update(wanted)
        gc.disable()  # imports leave no garbage, and looking for it takes a seventh of their time
        for name in wanted:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        own = {*STANDARD, *descriptors, self._requests.fileno(), self._lifeline}
        own |= {child.report.fileno() for child in self._children}
        self._unfit = why_not_fork(own)
        gc.freeze()  # a collection in a worker would write to, and so copy, the pages of all these objects
        gc.enable()


def why_not_fork(own: set[int]) -> str:
    """Return why this process cannot be forked into workers; empty if it can. `own`: the descriptors that it may have.

    A device that an import has initialised has both threads and descriptors.
    """
    child = os.fork()  # before it, libraries that know of forks end their threads (OpenBLAS does)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    give_up = time.monotonic() + SETTLE_SECONDS
    while (threads := len(list(Path("/proc/self/task").iterdir()))) > 1 and time.monotonic() < give_up:
        time.sleep(0.001)
    if threads > 1:
        return f"an import has started {threads - 1} threads"
    others = open_descriptors() - own
    if others:
        names = ", ".join(sorted(str(Path(f"/proc/self/fd/{number}").readlink()) for number in others))
        return f"an import has left {len(others)} descriptors open: {names}"
    return ""


def open_descriptors() -> set[int]:
    """Return the numbers of this process's open descriptors."""
    listed = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    return {number for number in listed if Path(f"/proc/self/fd/{number}").is_symlink()}  # not the one that listed them


def assign_descriptors(wanted: dict[int, int]) -> None:
    """Make `wanted` ({number: open descriptor}) the descriptors of this process, besides stdin; close all others."""
    sources = dict(wanted)
    for number in sources:
        for other, source in sources.items():
            if source == number and other != number:  # in the way, and needed later
                sources[other] = os.dup(source)
        if sources[number] != number:
            os.dup2(sources[number], number)
        os.set_inheritable(number, True)
        sources[number] = number
    for number in open_descriptors() - {0} - set(wanted):
        os.close(number)


def _is_closed(report: socket.socket) -> bool:
    """Return whether the caller has closed its end."""
    try:
        return not report.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def _reseed() -> None:
    """Seed the global generators of numpy and torch anew, as in a new process; Python does so with its own."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
