"""Worker processes of this process, one per device. This process controls them and is not a rank.

It imports neither torch nor other slow modules, and uses no device. If a worker dies or hangs, the current call
raises; the next call starts new workers and repeats the calls that were made with `replay`.
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Literal

from patchpar.errors import LaunchError, WorkerError
from patchpar.launch.executor import Callbacks, EngineCall, Executor, check_deadline
from patchpar.launch.fork_guard import change_in_children, check_owner
from patchpar.launch.messages import EncodedMessage, encode_call
from patchpar.launch.pool import WorkerPool, WorkerPoolSpec
from patchpar.launch.replay import CallEffects, ReplayedCall, ReplayLog
from patchpar.launch.start_method import AUTO, resolve_start_method

MAX_FAILED_STARTS = 3
log = logging.getLogger(__name__)


class LocalExecutor(Executor):
    """An Executor whose ranks are worker processes on this machine.

    `devices`: one torch device name per rank. `engine`: "package.module:Class". `deadline`: seconds without progress
    that a rank may take during a call, see `hang_detection`. `start_timeout`: seconds for the workers to import modules
    and connect. `preload`: modules that the workers import while they start. `start_method`: "forkserver" (workers are
    forked from a template process that has imported these modules), "spawn" (each is a new Python process), or "auto".
    Raises LaunchError.
    """

    kind: Literal["local"] = "local"

    def __init__(
        self,
        devices: Sequence[str],
        engine: str,
        *,
        deadline: float = 60.0,
        start_timeout: float = 600.0,
        preload: Sequence[str] = (),
        start_method: str = AUTO,
    ) -> None:
        if sys.platform == "win32":
            raise LaunchError("worker processes need Linux or macOS; on Windows use one device")
        if not devices:
            raise LaunchError("at least one device is needed")
        super().__init__(devices, engine, deadline)
        self.start_method = resolve_start_method(start_method, self.devices)
        self._spec = WorkerPoolSpec(
            devices=self.devices,
            engine=engine,
            deadline=self._deadline,
            start_timeout=check_deadline("start_timeout", start_timeout),
            preload=tuple(preload),
            start_method=self.start_method.name,
        )
        self._pool: WorkerPool | None = None
        self._is_ready = False
        self._failed_starts: list[str] = []
        self._journal = ReplayLog()
        self._lock = threading.RLock()
        self._is_busy = False
        self._owner = os.getpid()
        change_in_children(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers in rank order, as soon as they exist; empty if none are running."""
        pool = self._pool
        return pool.pids if pool is not None else ()

    def start(self) -> None:
        """Begin to start the workers and return at once. `call` does it too. Raises LaunchError."""
        check_owner(self._owner)
        with self._lock:
            self._check_open()
            if self._pool is None:
                self._pool = WorkerPool(self._spec)
                self._is_ready = False

    def _call(self, call: EngineCall) -> list[Any]:
        """See Executor.call. Calls from several threads run one after another."""
        check_owner(self._owner)
        message = encode_call(call.method, call.args, call.kwargs, call.expected)
        try:
            with self._lock:
                self._enter()
                try:
                    self._make_ready()
                    result = self._run(message, call.callbacks, call.expected)
                finally:
                    self._is_busy = False
                if call.replay:
                    self._keep(call, message)
                return result
        finally:
            message.close()

    def remember(
        self, method: str, *args: Any, replay: bool | str | CallEffects = True, expected: float = 0.0, **kwargs: Any
    ) -> None:
        """Repeat this call on workers that are started later; the current ones have done it in another way."""
        change = CallEffects.of(replay)
        with self._lock:
            self._journal.add(ReplayedCall(method=method, args=args, kwargs=kwargs, expected=expected, change=change))

    def _keep(self, call: EngineCall, sent: EncodedMessage) -> None:
        change, small = CallEffects.of(call.replay), sent if sent.block is None else None
        method, args, kwargs = call.method, call.args, call.kwargs
        self._journal.add(
            ReplayedCall(method=method, args=args, kwargs=kwargs, expected=call.expected, change=change, sent=small)
        )

    def _enter(self) -> None:
        if self._is_busy:
            raise LaunchError("on_event and on_ask cannot make a call: wait until the current call has returned")
        self._is_busy = True

    def _run(self, message: EncodedMessage, callbacks: Callbacks, expected: float) -> list[Any]:
        pool = self._pool
        if pool is None:
            raise LaunchError("this executor was closed during the call")
        try:
            return pool.call(message, callbacks, expected)
        except WorkerError as error:
            if self._is_closed:
                raise LaunchError("this executor was closed during the call") from error
            raise
        finally:
            if not pool.is_usable:
                self._drop_pool()

    def _make_ready(self) -> None:
        """Start workers if there are none, wait until they are ready, and repeat the recorded calls."""
        if self._pool is not None and not self._pool.is_alive() and self._is_ready:
            log.warning("a worker ended while it was idle; restarting the workers")
            self._drop_pool()
        if self._pool is not None and self._is_ready:
            return
        if len(self._failed_starts) >= MAX_FAILED_STARTS:
            raise LaunchError(
                f"the workers could not be started {MAX_FAILED_STARTS} times in a row; remove the cause and create a "
                f"new executor. The last error: {self._failed_starts[-1]}"
            )
        try:
            self.start()
            assert self._pool is not None
            self._pool.wait_until_ready()
            self.random_widths = self._pool.random_widths
            self._replay()
        except BaseException as error:
            self._drop_pool()
            if isinstance(error, LaunchError):
                self._failed_starts.append(str(error))
            raise
        self._failed_starts.clear()
        self._is_ready = True

    def _replay(self) -> None:
        for entry in self._journal:
            message = entry.message()
            try:
                self._run(message, Callbacks(), entry.expected)
            except Exception as error:
                raise LaunchError(f"workers were restarted, but repeating {entry.method!r} failed: {error}") from error
            finally:
                message.close()

    def _drop_pool(self) -> None:
        pool, self._pool, self._is_ready = self._pool, None, False
        if pool is not None:
            pool.kill()

    def close(self) -> None:
        """End the workers; idle ones are asked to stop. Idempotent and thread-safe."""
        self._is_closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
