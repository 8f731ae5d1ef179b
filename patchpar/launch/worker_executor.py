"""An executor of workers that this process controls and is no rank of.

It imports neither torch nor other slow modules, and uses no device. If a worker dies or hangs, the current call
raises; the next call starts new workers and repeats on them the calls that were made with `replay`.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from patchpar.errors import LaunchError, PlanError, WorkerDied, WorkerError
from patchpar.launch.executor import Callbacks, EngineCall, Executor
from patchpar.launch.fork_guard import check_owner
from patchpar.launch.messages import EncodedMessage, encode_call
from patchpar.launch.pool import WorkerPool
from patchpar.launch.rank_process import ProcessStarter
from patchpar.launch.replay import CallEffects, ReplayedCall, ReplayLog
from patchpar.launch.worker_start import WorkerPoolSpec

MAX_FAILED_STARTS = 3
PAUSE_SECONDS = 20.0
"""So long after as many failed starts in a row no other one is tried, which may take minutes to fail."""
log = logging.getLogger(__name__)


class WorkerExecutor(Executor):
    """An Executor of the workers of `spec`, which `starter` starts where they run. Raises LaunchError."""

    kind: Literal["local"] = "local"

    def __init__(self, spec: WorkerPoolSpec, starter: ProcessStarter) -> None:
        super().__init__(spec.devices, spec.engine, spec.deadline)
        self._pool = WorkerPool(spec, starter)
        self._failed_starts, self._failed_at = list[str](), 0.0
        self._journal = ReplayLog()
        self._owner = os.getpid()

    @property
    def has_groups(self) -> bool:
        """See Executor."""
        return self._pool.spec.needs_group

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers in rank order, as soon as they exist; empty if none are running."""
        return self._pool.pids

    def ready(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """See Executor."""
        return self._pool.ready(ranks)

    def start(self) -> None:
        """Begin to start the workers and return at once. `call` does it too. Raises LaunchError."""
        check_owner(self._owner)
        self._check_open()
        ranks = range(self.world_size)
        if not self._locks.are_held_here:  # as in a callback of a call, for which they have been started
            with self._locks.holding(ranks):
                self._pool.start(ranks)

    def _call(self, call: EngineCall) -> list[Any]:
        """See Executor.call."""
        check_owner(self._owner)
        self._refuse(call)
        message = encode_call(call.method, call.args, call.kwargs, call.expected)
        try:
            try:
                return self._call_once(call, message)
            except WorkerDied as error:  # ended just before the call: as those that have been found dead before one
                if error.begun or self._is_closed:
                    raise
                log.warning("rank %s had ended before it began %r; restarting it", error.rank, call.method)
                return self._call_once(call, message)
        finally:
            message.close()

    def _call_once(self, call: EngineCall, message: EncodedMessage) -> list[Any]:
        """Make the call on workers that are ready. Raises as `Executor.call` does."""
        with self._ready_ranks(call) as ranks:
            if call.divides:  # also if it fails half-way
                self._pool.bind(ranks, divided=True)
            try:
                result = self._run(ranks, message, call.callbacks, call.expected)
            except WorkerError:  # not all ranks raised alike: some may have changed, as a later call would not know
                if call.replay:
                    self._pool.drop(ranks)
                raise
            if call.divides is False:
                self._pool.bind(ranks, divided=False)
            if call.replay:
                self._keep(call, message)
            return result

    @contextmanager
    def _ready_ranks(self, call: EngineCall) -> Iterator[tuple[int, ...]]:
        """Hold the ranks of a call, and those that they bring into it, with workers that are ready."""
        left_out = self._left_out(call) if call.replay else frozenset[int]()
        needed = left_out.union(call.ranks)
        while True:
            with self._locks.holding(needed, call.callbacks.check):
                self._check_open()
                ranks = self._pool.with_bound(call.ranks)
                lacking = self._pool.lacking(ranks)
                if needed.issuperset(lacking.union(ranks)):
                    self._make_ready(sorted(lacking))
                    self._pool.drop(left_out)  # one that a call has named since would not know of this change
                    yield ranks
                    return
            needed = lacking.union(ranks)  # never of a call with `left_out`, which holds all ranks

    def _refuse(self, call: EngineCall) -> None:
        """Raise LaunchError for a call within a call, PlanError for one on no ranks."""
        self._refuse_within_call("make another one")
        if not call.ranks:
            raise PlanError(f"all {self.world_size} ranks are released: take one back first")

    def _refuse_within_call(self, what: str) -> None:
        """Raise LaunchError if this thread holds the ranks of a call: it would wait for itself."""
        if self._locks.are_held_here:
            raise LaunchError(
                f"a function that is called during a call, such as a callback, cannot {what}: do so when the current "
                "call has returned"
            )

    def _left_out(self, call: EngineCall) -> frozenset[int]:
        """Return the ranks that have been released, by a call on all ranks."""
        return frozenset(range(self.world_size)).difference(call.ranks)

    def release(self, rank: int) -> None:
        """End the worker of a rank once its call has ended, and leave it out of calls that name no ranks.

        Raises PlanError for a rank that does not exist, LaunchError within a call. Workers of a default group are lost
        together.
        """
        check_owner(self._owner)
        self.check_ranks((rank,))
        self._refuse_within_call("release a rank")
        with self._locks.holding([rank]):
            self._check_open()
            self._released.add(rank)
            self._pool.drop([rank])

    def take_back(self, rank: int) -> None:
        """Bring a rank into calls that name no ranks. The first one starts its worker, which repeats what is replayed.

        Raises PlanError for a rank that does not exist.
        """
        self.check_ranks((rank,))
        self._released.discard(rank)

    def remember(
        self, method: str, *args: Any, replay: bool | str | CallEffects = True, expected: float = 0.0, **kwargs: Any
    ) -> None:
        """Repeat this call on workers that are started later; the current ones have done it in another way.

        Those of released ranks have not, and are ended.
        """
        for rank in self._released.copy():
            with self._locks.holding([rank]):
                self._pool.drop([rank])
        self._journal.add(
            ReplayedCall(method=method, args=args, kwargs=kwargs, expected=expected, change=CallEffects.of(replay))
        )

    def _keep(self, call: EngineCall, sent: EncodedMessage) -> None:
        self._journal.add(
            ReplayedCall(
                method=call.method,
                args=call.args,
                kwargs=call.kwargs,
                expected=call.expected,
                change=CallEffects.of(call.replay),
                divides=call.divides,
                sent=sent if sent.block is None else None,
            )
        )

    def _run(self, ranks: Sequence[int], message: EncodedMessage, callbacks: Callbacks, expected: float) -> list[Any]:
        try:
            return self._pool.call(ranks, message, callbacks, expected)
        except WorkerError:
            if self._is_closed:
                raise LaunchError("the workers were closed during the call, by close()") from None
            raise

    def _make_ready(self, ranks: Sequence[int]) -> None:
        """Start these workers, wait until they are ready, and repeat the recorded calls on them."""
        if not ranks:
            return
        if self._pool.has_idle_deaths(ranks):
            log.warning("a worker ended while it was idle; restarting %s", _named(ranks))
        self._check_failed_starts()
        try:
            self._pool.start(ranks)
            self._pool.wait_until_ready(ranks)
            self._replay(ranks)
        except BaseException as error:
            self._pool.drop(ranks)
            if isinstance(error, LaunchError):
                self._failed_starts.append(str(error))
                self._failed_at = time.monotonic()
            raise
        self._failed_starts.clear()
        widths = self._pool.random_widths
        self.random_widths = tuple(widths[rank] for rank in sorted(widths))

    def _check_failed_starts(self) -> None:
        """Raise LaunchError soon after several failed starts. Later the cause may be gone, of a server too."""
        times, left = len(self._failed_starts), self._failed_at + PAUSE_SECONDS - time.monotonic()
        if times >= MAX_FAILED_STARTS and left > 0:
            raise LaunchError(
                f"the workers could not be started {times} times in a row; remove the cause: a call in {left:.0f} s or "
                f"later starts them again. The last error: {self._failed_starts[-1]}"
            )

    def _replay(self, ranks: Sequence[int]) -> None:
        for entry in self._journal:
            message = entry.message()
            try:
                self._run(ranks, message, Callbacks(), entry.expected)
                if entry.divides is not None:
                    self._pool.bind(ranks, divided=entry.divides)
            except Exception as error:
                if self._is_closed:
                    raise
                raise LaunchError(f"workers were restarted, but repeating {entry.method!r} failed: {error}") from error
            finally:
                message.close()

    def close(self) -> None:
        """End the workers; idle ones are asked to stop. Idempotent and thread-safe."""
        self._is_closed = True
        self._pool.close()


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
