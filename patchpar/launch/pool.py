"""A pool of workers, from the start of their processes to their end; those that a fault has ended are started anew."""

import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from patchpar.errors import LaunchError
from patchpar.launch.channel import EMPTY, ChannelFrame, FrameKind
from patchpar.launch.descriptors import open_standard_descriptors
from patchpar.launch.executor import CLOSED, Callbacks
from patchpar.launch.fork_guard import change_in_children, no_fork
from patchpar.launch.handshake import GroupStore, versions
from patchpar.launch.hang_detection import HangLimits
from patchpar.launch.messages import EncodedMessage, decode, encode
from patchpar.launch.rank_process import ProcessStarter, RankProcess
from patchpar.launch.request_failure import error_of, is_in_step, lost_ranks
from patchpar.launch.request_loop import RequestLoop
from patchpar.launch.worker_output import FirstPrinter
from patchpar.launch.worker_start import WorkerPoolSpec

STOP_SECONDS = 2.0  # for a worker to exit after a STOP frame
TERM_SECONDS = 1.0  # and after SIGTERM
KILL_SECONDS = 5.0  # only a process stuck in the kernel takes longer


class WorkerPool:
    """The workers of an executor by rank, at first none. Whoever calls a method has the ranks that it names.

    `start` begins to start workers; `wait_until_ready` has to follow.
    """

    def __init__(self, spec: WorkerPoolSpec, starter: ProcessStarter) -> None:
        self.spec, self._starter = spec, starter
        self._workers: dict[int, RankProcess] = {}
        self._is_single = spec.one_by_one and not spec.needs_group
        self._all = frozenset(range(len(spec.devices)))
        self._ready: set[int] = set()
        self._outdated: set[int] = set()  # are not used any more, since others of them have been lost
        self._busy: set[int] = set()
        self._linked: set[frozenset[int]] = set()  # pairs of ranks
        self._bound: dict[int, frozenset[int]] = {}  # of ranks that hold parts of one state: all that do
        self._stores: list[GroupStore] = []
        # Workers exit with this process anyway (their channel closes); this ends them when the pool is deleted.
        self._owner = os.getpid()
        weakref.finalize(self, _end_all, self._workers, self._stores, self._owner)
        self._requests = itertools.count(1)  # 0: the WorkerConfig
        self._facts: dict[str, str] = {}
        self._is_closed = False
        self.random_widths: dict[int, int] = {}  # of the ranks' devices, once they are ready
        self._speakers = FirstPrinter()
        change_in_children(self)

    def start(self, ranks: Collection[int]) -> None:
        """Start processes for those of `ranks` that have none, or one that is not used any more. Raises LaunchError."""
        # Those that a lost one takes along would not answer their first message a second time.
        lost = self._taken_along([rank for rank in ranks if rank in self._outdated or self._has_died(rank)])
        self.drop([rank for rank in ranks if rank in lost])
        missing = sorted(rank for rank in ranks if rank not in self._workers)
        if not missing:
            return
        self.bind(missing, divided=False)
        try:
            with no_fork():
                self._check_open()
                open_standard_descriptors()
                for worker in self._starter.start(missing, self._new_store(), self._speakers):
                    self._workers[worker.rank] = worker
            self._check_open()  # `close` of another thread may not have seen them
        except BaseException:
            self.drop(missing)
            raise

    def after_fork(self) -> None:
        for worker in list(self._workers.values()):
            worker.after_fork()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes in rank order, as soon as they exist. Raises LaunchError if one is not started."""
        give_up = time.monotonic() + self.spec.start_timeout
        return tuple(worker.wait_for_pid(give_up) for _, worker in sorted(self._workers.items()))

    def _new_store(self) -> GroupStore | None:
        """Return where workers meet that are started together, if they have a default group."""
        if not self.spec.needs_group:
            return None
        self._close_stores()
        self._stores.append(GroupStore())
        return self._stores[0]

    def _close_stores(self) -> None:
        while self._stores:
            self._stores.pop().close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise LaunchError(CLOSED)

    def with_bound(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks, and behind them those that hold parts of the same state as one of them."""
        others = frozenset[int]().union(*(self._bound.get(rank, ()) for rank in ranks)) - {*ranks}
        return (*ranks, *sorted(others))

    def bind(self, ranks: Sequence[int], *, divided: bool) -> None:
        """Note whether these ranks hold parts of one state from now on, or each all of it."""
        for rank in ranks:
            self._bound.pop(rank, None)
        if divided:
            self._bound.update(dict.fromkeys(ranks, frozenset(ranks)))

    def lacking(self, ranks: Sequence[int]) -> frozenset[int]:
        """Return which ranks have to be started before a call on `ranks`: also those that a lost one takes along."""
        lost = [rank for rank in ranks if rank not in self._ready or rank in self._outdated or self._has_died(rank)]
        return self._taken_along(lost)

    def _taken_along(self, lost: Collection[int]) -> frozenset[int]:
        """Return these ranks and those that cannot be used any more without them."""
        if lost and not self._is_single:
            return self._all
        return frozenset(self.with_bound(tuple(lost)))

    def ready(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of `ranks` that need not be started before a call on them."""
        lacking = self.lacking(ranks)
        return tuple(rank for rank in ranks if rank not in lacking)

    def has_idle_deaths(self, ranks: Iterable[int]) -> bool:
        """Whether one of these workers was ready, and has ended since."""
        return any(rank in self._ready and self._has_died(rank) for rank in ranks)

    def _has_died(self, rank: int) -> bool:
        worker = self._workers.get(rank)  # `close` of another thread may end it meanwhile
        return worker is not None and not worker.is_alive()

    def wait_until_ready(self, ranks: Sequence[int]) -> None:
        """Wait for workers, compare their versions, connect them and create their engines. Raises LaunchError."""
        facts = self._start_up(None, ranks)  # the replies to WorkerConfig, which was sent when they were started
        for rank, found in zip(ranks, facts, strict=True):
            of_others = {name: value for name, value in self._facts.items() if name in found}
            expected = {**facts[0], **of_others, **versions()}
            if found != expected:
                raise LaunchError(f"rank {rank} has {found}, where {expected} was expected: use the same versions")
        widths = self._start_up(FrameKind.FORM, ranks)
        self._facts = self._facts or facts[0]
        self.random_widths.update(zip(ranks, widths, strict=True))
        self._ready |= {*ranks}

    def _start_up(self, kind: FrameKind | None, ranks: Sequence[int]) -> list[Any]:
        try:
            return self._request(kind, ranks, EMPTY, Callbacks(), HangLimits.of_start(self.spec.start_timeout))
        except LaunchError:
            raise
        except Exception as error:
            self._check_open()  # else another thread has ended them
            raise LaunchError(f"the workers could not be started: {error}") from error

    def call(self, ranks: Sequence[int], message: EncodedMessage, callbacks: Callbacks, expected: float) -> list[Any]:
        """Run one encoded call on these ranks, and return the results in this order. Raises as `Executor.call` does.

        Workers that are lost in it are ended; the others can be used again.
        """
        limits = HangLimits.of_call(self.spec.deadline, expected)
        return self._request(FrameKind.CALL, ranks, message, callbacks, limits)

    def _request(
        self,
        kind: FrameKind | None,
        ranks: Sequence[int],
        message: EncodedMessage,
        callbacks: Callbacks,
        limits: HangLimits,
    ) -> list[Any]:
        workers, lost = self._running(ranks), list(ranks)  # if an interrupt ends it
        unwinds = self._is_single and kind is FrameKind.CALL
        self._busy.update(ranks)
        try:
            request, opening = self._opening(kind, ranks, message)
            loop = RequestLoop(list(workers.values()), request, callbacks, limits=limits, unwinds=unwinds)
            outcome = loop.run(opening)
            error = error_of(outcome, workers, limits)
            if is_in_step(outcome, ranks):
                lost = []
            elif unwinds:
                self._linked.difference_update(_pairs(ranks))  # which may have messages in them
                lost = [*lost_ranks(outcome, ranks), *(rank for rank in ranks if rank in self._bound)]
        finally:
            self._busy.difference_update(ranks)
            self.drop(lost)
            with contextlib.suppress(OSError):  # then the next call has to; the cause of this one's end is not lost
                self._connect([rank for rank in ranks if rank in self._workers and rank not in self._outdated])
        if error is not None:
            for result in outcome.results.values():
                result.close()
            raise error
        return [_decoded(outcome.results[rank]) for rank in ranks]

    def _running(self, ranks: Sequence[int]) -> dict[int, RankProcess]:
        """Return the workers of these ranks. Raises LaunchError if `close` of another thread has ended one."""
        found = {rank: worker for rank, worker in list(self._workers.items()) if rank in ranks}
        if len(found) < len(ranks):
            self._check_open()
        return {rank: found[rank] for rank in ranks}

    def _opening(
        self, kind: FrameKind | None, ranks: Sequence[int], message: EncodedMessage
    ) -> tuple[int, list[ChannelFrame]]:
        """Return number and first frames of a request, and connect its ranks."""
        if kind is None:
            return 0, []
        request = next(self._requests)
        self._connect(ranks)
        named = ChannelFrame(FrameKind.RANKS, request, encode(tuple(ranks)))
        return request, [named, ChannelFrame(kind, request, message)]

    def _connect(self, ranks: Sequence[int]) -> None:
        """Give every two of these ranks a link, unless they have one."""
        for pair in _pairs(ranks):
            workers = [self._workers.get(rank) for rank in sorted(pair)]
            if pair not in self._linked and None not in workers:  # `close` of another thread may have ended one
                self._starter.link(*filter(None, workers))
                self._linked.add(pair)

    def drop(self, ranks: Collection[int]) -> None:
        """End these workers; those that a lost one takes along are started anew before their next call.

        Idempotent; an interrupt is raised after the workers have ended.
        """
        gone = list(filter(None, map(self._workers.get, ranks)))  # another thread may end one meanwhile
        if not gone:
            return
        self._outdated.update(self._taken_along(ranks))
        self._outdated.difference_update(ranks)
        self._ready.difference_update(ranks)
        self._linked.difference_update(pair for pair in list(self._linked) if not pair.isdisjoint(ranks))
        try:
            _end(gone, self._owner)
        except KeyboardInterrupt:  # a second one: finish what the first one started
            _end(gone, self._owner)
            raise
        finally:
            for rank in ranks:
                self._workers.pop(rank, None)

    def close(self) -> None:
        """Stop the workers: by a STOP frame, then SIGTERM, then SIGKILL; those in a call at once."""
        self._is_closed = True
        if os.getpid() != self._owner:
            return  # in a forked child, whose workers they are not
        try:
            self._stop([worker for rank, worker in list(self._workers.items()) if rank in self._ready - self._busy])
        finally:  # also when an interrupt comes: whoever catches it has no more use for the workers
            self.drop(sorted(self._workers))
            self._close_stores()

    def _stop(self, idle: Sequence[RankProcess]) -> None:
        for worker in idle:
            worker.ask_to_stop()
        if not self._busy and not _wait(idle, STOP_SECONDS):
            for worker in idle:
                worker.terminate()
            _wait(idle, TERM_SECONDS)


def _pairs(ranks: Sequence[int]) -> list[frozenset[int]]:
    return [frozenset(pair) for pair in itertools.combinations(ranks, 2)]


def _decoded(message: EncodedMessage) -> Any:
    try:
        return decode(message)
    finally:
        message.close()


def _wait(workers: Sequence[RankProcess], seconds: float) -> bool:
    give_up = time.monotonic() + seconds
    return all([worker.wait(give_up) for worker in workers])


def _end(workers: Sequence[RankProcess], owner: int) -> None:
    """Kill and reap; may be repeated after an interrupt. Does nothing in a forked child of the owner."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.kill()
    _wait(workers, KILL_SECONDS)
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.release()


def _end_all(workers: dict[int, RankProcess], stores: list[GroupStore], owner: int) -> None:
    _end(list(workers.values()), owner)
    for store in stores if os.getpid() == owner else ():
        store.close()
