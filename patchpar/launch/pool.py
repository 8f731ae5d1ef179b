"""One generation of workers: from the start of their processes to their end. A fault ends the generation."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.errors import LaunchError
from patchpar.launch.channel import EMPTY, ChannelFrame, FrameKind
from patchpar.launch.devices import available_cores
from patchpar.launch.executor import Callbacks, longest_wait
from patchpar.launch.fork_guard import change_in_children, no_fork
from patchpar.launch.handshake import (
    PACKAGE_ROOT,
    NcclStore,
    WorkerConfig,
    needs_nccl,
    threads_per_rank,
    versions,
    worker_environment,
)
from patchpar.launch.hang_detection import HangLimits
from patchpar.launch.messages import EncodedMessage, decode, encode
from patchpar.launch.process import WorkerProcess
from patchpar.launch.request_failure import error_of, is_reusable
from patchpar.launch.request_loop import RequestLoop, RequestOutcome
from patchpar.launch.socket_pairs import SocketPairs
from patchpar.launch.worker_output import FirstPrinter

STOP_SECONDS = 2.0  # for a worker to leave when asked
TERM_SECONDS = 1.0  # and when told
KILL_SECONDS = 5.0  # only a process stuck in the kernel takes longer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoolSpec:
    """What a pool is to be. Times in seconds."""

    devices: tuple[str, ...]
    engine: str
    deadline: float
    start_timeout: float
    preload: tuple[str, ...]


class WorkerPool:
    """Workers of one generation. Made starting: the processes run, `wait_until_ready` has to follow."""

    def __init__(self, spec: WorkerPoolSpec) -> None:
        self.spec = spec
        self._workers: list[WorkerProcess] = []
        self._store = NcclStore() if needs_nccl(spec.devices) else None
        # The workers end with us in any case (their channel closes); this ends them when the pool is dropped.
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._workers, self._store, self._owner)
        self._request = 0
        self.is_usable = True
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
        environment, speakers = worker_environment(threads), FirstPrinter()
        path = tuple(sys.path) if PACKAGE_ROOT in sys.path else (*sys.path, PACKAGE_ROOT)
        for rank, device in enumerate(spec.devices):
            ends = links.of(rank)
            inherit = (*ends.values(), *(store.inherit if store else ()))
            worker = WorkerProcess(rank, device, environment=environment, speakers=speakers, inherit=inherit)
            self._workers.append(worker)
            links.release(rank)
            config = WorkerConfig(
                rank=rank,
                world_size=world,
                device=device,
                engine=spec.engine,
                preload=spec.preload,
                deadline=spec.deadline,
                # Only we know how long a call may take and see which rank is late, so we judge first.
                group_timeout=longest_wait(spec.deadline + spec.start_timeout),
                threads=threads,
                path=path,
                nccl_store=store.path if store else None,
                heartbeat=worker.heartbeat_fd,
                lifeline=worker.lifeline_fd,
                links=ends,
            )
            worker.greet(encode(config))

    def after_fork(self) -> None:
        """See Forkable."""
        for worker in self._workers:
            worker.let_go()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, by rank."""
        return tuple(worker.pid for worker in self._workers)

    def wait_until_ready(self) -> None:
        """Wait for all workers, compare their versions, and have them join and make their engines.

        Raises LaunchError.
        """
        facts = self._start_up(None)  # the answers to the hello, which was said when they were started
        for rank, found in enumerate(facts):
            expected = {**facts[0], **versions()}
            if found != expected:
                raise LaunchError(f"rank {rank} differs: it has {found}, where {expected} was expected")
        self._start_up(FrameKind.FORM)

    def _start_up(self, kind: FrameKind | None) -> list[Any]:
        try:
            return self._request_all(kind, EMPTY, Callbacks(), HangLimits.of_start(self.spec.start_timeout))
        except LaunchError:
            raise
        except Exception as error:
            raise LaunchError(f"the workers could not be started: {error}") from error

    def call(self, message: EncodedMessage, callbacks: Callbacks, expected: float) -> list[Any]:
        """Run one encoded call on all ranks. Raises what `Executor.call` raises; look at `is_usable` afterwards."""
        return self._request_all(FrameKind.CALL, message, callbacks, HangLimits.of_call(self.spec.deadline, expected))

    def _request_all(
        self, kind: FrameKind | None, message: EncodedMessage, callbacks: Callbacks, limits: HangLimits
    ) -> list[Any]:
        self.is_usable = False  # until it has ended well: also if an interrupt ends it anywhere
        loop = RequestLoop(self._workers, self._request, callbacks, limits=limits)
        opening = None if kind is None else ChannelFrame(kind, self._request, message)
        self._request += 1
        outcome = loop.run(opening)
        error = error_of(outcome, self._workers, limits)
        self.is_usable = is_reusable(outcome, self._workers)
        if error is not None:
            _drop(outcome)
            raise error
        return [_open(outcome.results[rank]) for rank in range(len(self._workers))]

    def is_alive(self) -> bool:
        """Whether no worker has ended."""
        return all(worker.is_alive() for worker in self._workers)

    def kill(self) -> None:
        """End all workers at once. Harmless when done twice; an interrupt comes when it is done."""
        self.is_usable = False
        try:
            _end(self._workers, self._store, self._owner)
        except KeyboardInterrupt:  # the second one: what has been begun by the first must not be left half done
            _end(self._workers, self._store, self._owner)
            raise
        finally:
            if not any(worker.is_alive() for worker in self._workers):
                self._finalizer.detach()

    def close(self) -> None:
        """Ask the workers to leave, insist, and clear up."""
        if os.getpid() != self._owner:
            return  # in a child that was forked: they are not its workers
        if self.is_usable:
            for worker in self._workers:
                worker.ask_to_stop()
            if not _wait(self._workers, STOP_SECONDS):
                for worker in self._workers:
                    worker.terminate()
                _wait(self._workers, TERM_SECONDS)
        self.kill()


def _open(message: EncodedMessage) -> Any:
    try:
        return decode(message)
    finally:
        message.close()


def _drop(outcome: RequestOutcome) -> None:
    for message in outcome.results.values():
        message.close()


def _wait(workers: Sequence[WorkerProcess], seconds: float) -> bool:
    give_up = time.monotonic() + seconds
    return all([worker.wait(give_up) for worker in workers])


def _end(workers: list[WorkerProcess], store: NcclStore | None, owner: int) -> None:
    """Kill and reap; may be done again after an interrupt. Does nothing in a child that was forked from the owner."""
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
