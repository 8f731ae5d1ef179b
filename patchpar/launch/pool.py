"""A pool of workers, from the start of their processes to their end. A fault ends the pool."""

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.errors import LaunchError
from patchpar.launch.channel import EMPTY, ChannelFrame, FrameKind, SocketPairs
from patchpar.launch.devices import available_cores
from patchpar.launch.executor import Callbacks, longest_wait
from patchpar.launch.fork_guard import change_in_children, no_fork
from patchpar.launch.handshake import (
    PACKAGE_ROOT,
    GroupStore,
    WorkerConfig,
    needs_group,
    threads_per_rank,
    versions,
    worker_environment,
)
from patchpar.launch.hang_detection import HangLimits
from patchpar.launch.messages import EncodedMessage, decode, encode
from patchpar.launch.process import WorkerProcess, WorkerStart
from patchpar.launch.request_failure import error_of, is_reusable
from patchpar.launch.request_loop import RequestLoop
from patchpar.launch.start_method import StartMethodName
from patchpar.launch.started_process import FreshProcess
from patchpar.launch.templates import fork_worker
from patchpar.launch.worker_output import FirstPrinter

STOP_SECONDS = 2.0  # for a worker to exit after a STOP frame
TERM_SECONDS = 1.0  # and after SIGTERM
KILL_SECONDS = 5.0  # only a process stuck in the kernel takes longer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoolSpec:
    """Settings of a pool. Times in seconds."""

    devices: tuple[str, ...]
    engine: str
    deadline: float
    start_timeout: float
    start_method: StartMethodName
    preload: tuple[str, ...]


class WorkerPool:
    """A pool of workers. The constructor starts the processes; `wait_until_ready` has to follow."""

    def __init__(self, spec: WorkerPoolSpec) -> None:
        self.spec = spec
        self._workers: list[WorkerProcess] = []
        self._store = GroupStore() if needs_group(spec.devices) else None
        # Workers exit with this process anyway (their channel closes); this ends them when the pool is deleted.
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._workers, self._store, self._owner)
        self._request = 0
        self.is_usable = True
        self.random_widths: tuple[int, ...] = ()  # of the ranks' devices, once they are ready
        with no_fork():
            change_in_children(self)
            links = SocketPairs(len(spec.devices))
            try:
                self._spawn(links)
            except BaseException:
                self.kill()
                raise
            finally:
                links.close()

    def _spawn(self, links: SocketPairs) -> None:
        spec, store, world = self.spec, self._store, len(self.spec.devices)
        threads = threads_per_rank(available_cores(), world)
        start = WorkerStart(
            starter=fork_worker if spec.start_method == "forkserver" else FreshProcess,
            environment=worker_environment(threads),
            path=tuple(sys.path) if PACKAGE_ROOT in sys.path else (*sys.path, PACKAGE_ROOT),
            modules=(spec.engine.partition(":")[0], *spec.preload, *(["torch"] if world > 1 else [])),
            speakers=FirstPrinter(),
        )
        for rank, device in enumerate(spec.devices):
            ends = links.of(rank)
            inherit = (*ends.values(), *(store.inherit if store else ()))
            worker = WorkerProcess(rank, device, start, inherit)
            self._workers.append(worker)
            links.release(rank)
            config = WorkerConfig(
                rank=rank,
                world_size=world,
                device=device,
                engine=spec.engine,
                preload=spec.preload,
                deadline=spec.deadline,
                # The caller knows the limit of a call and sees which rank is late, so it has to detect hangs first.
                group_timeout=longest_wait(spec.deadline + spec.start_timeout),
                threads=threads,
                path=start.path,
                group_store=store.path if store else None,
                session_key=store.session_key if store else b"",
                heartbeat=worker.heartbeat_fd,
                lifeline=worker.lifeline_fd,
                links=ends,
            )
            worker.send_config(encode(config))

    def after_fork(self) -> None:
        for worker in self._workers:
            worker.after_fork()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids in rank order, as soon as all processes exist. Raises LaunchError if one is not started."""
        give_up = time.monotonic() + self.spec.start_timeout
        return tuple(worker.wait_for_pid(give_up) for worker in self._workers)

    def wait_until_ready(self) -> None:
        """Wait for all workers, compare their versions, connect them and create their engines. Raises LaunchError."""
        facts = self._start_up(None)  # the replies to WorkerConfig, which was sent when they were started
        for rank, found in enumerate(facts):
            expected = {**facts[0], **versions()}
            if found != expected:
                raise LaunchError(f"rank {rank} has {found}, where {expected} was expected: use the same versions")
        self.random_widths = tuple(self._start_up(FrameKind.FORM))

    def _start_up(self, kind: FrameKind | None) -> list[Any]:
        try:
            return self._request_all(kind, EMPTY, Callbacks(), HangLimits.of_start(self.spec.start_timeout))
        except LaunchError:
            raise
        except Exception as error:
            raise LaunchError(f"the workers could not be started: {error}") from error

    def call(self, message: EncodedMessage, callbacks: Callbacks, expected: float) -> list[Any]:
        """Run one encoded call on all ranks. Raises what `Executor.call` raises; check `is_usable` afterwards."""
        return self._request_all(FrameKind.CALL, message, callbacks, HangLimits.of_call(self.spec.deadline, expected))

    def _request_all(
        self, kind: FrameKind | None, message: EncodedMessage, callbacks: Callbacks, limits: HangLimits
    ) -> list[Any]:
        self.is_usable = False  # until it has ended well; stays so if an interrupt ends it
        loop = RequestLoop(self._workers, self._request, callbacks, limits=limits)
        opening = None if kind is None else ChannelFrame(kind, self._request, message)
        self._request += 1
        outcome = loop.run(opening)
        error = error_of(outcome, self._workers, limits)
        self.is_usable = is_reusable(outcome, self._workers)
        if error is not None:
            for result in outcome.results.values():
                result.close()
            raise error
        return [_decoded(outcome.results[rank]) for rank in range(len(self._workers))]

    def is_alive(self) -> bool:
        """Return whether all workers are running."""
        return all(worker.is_alive() for worker in self._workers)

    def kill(self) -> None:
        """Kill all workers. Idempotent; an interrupt is raised after the workers have ended."""
        self.is_usable = False
        try:
            _end(self._workers, self._store, self._owner)
        except KeyboardInterrupt:  # a second one: finish what the first one started
            _end(self._workers, self._store, self._owner)
            raise
        finally:
            if not any(worker.is_alive() for worker in self._workers):
                self._finalizer.detach()

    def close(self) -> None:
        """Stop the workers: by a STOP frame, then SIGTERM, then SIGKILL."""
        if os.getpid() != self._owner:
            return  # in a forked child, whose workers they are not
        if self.is_usable:
            for worker in self._workers:
                worker.ask_to_stop()
            if not _wait(self._workers, STOP_SECONDS):
                for worker in self._workers:
                    worker.terminate()
                _wait(self._workers, TERM_SECONDS)
        self.kill()


def _decoded(message: EncodedMessage) -> Any:
    try:
        return decode(message)
    finally:
        message.close()


def _wait(workers: Sequence[WorkerProcess], seconds: float) -> bool:
    give_up = time.monotonic() + seconds
    return all([worker.wait(give_up) for worker in workers])


def _end(workers: list[WorkerProcess], store: GroupStore | None, owner: int) -> None:
    """Kill and reap; may be repeated after an interrupt. Does nothing in a forked child of the owner."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.kill()
    _wait(workers, KILL_SECONDS)
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.release()
    if store is not None:
        store.close()
