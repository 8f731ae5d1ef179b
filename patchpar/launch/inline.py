"""Executors of ranks that run in this process: their base, and that of a single rank, where a call is a plain one."""

import queue
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

from patchpar.launch.accelerators import current_device
from patchpar.launch.executor import Callbacks, EngineCall, Executor, engine_method, load_engine
from patchpar.launch.message_seal import MessageSeal


class OwnProcessContext(ABC):
    """Base of the RankContexts of ranks that run in this process."""

    def __init__(
        self,
        rank: int,
        devices: tuple[str, ...],
        links: Mapping[int, socket.socket] | None,
        seal: MessageSeal | None = None,
    ) -> None:
        self.rank, self.world_size, self.device, self.links = rank, len(devices), devices[rank], links
        self.seal = seal
        self.deadline = 0.0  # before the first call
        self.waiting = nullcontext()
        self.callbacks = Callbacks()
        self.where, self.beats = "", 0  # the last exchange point, and the number of those that were reached

    @property
    def wait_limit(self) -> float:
        return self.deadline

    def emit(self, event: object) -> None:
        """See RankContext. Only rank 0's events are passed on: other ranks are other processes."""
        if self.rank == 0:
            self.callbacks.event(0, event)

    @abstractmethod
    def ask(self, question: object) -> Any:
        """See RankContext."""

    def beat(self, where: str) -> None:
        self.where = where
        self.beats += 1


class OwnProcessExecutor(Executor):
    """An Executor of which this process is a rank. The engine is created at the first call."""

    _context: OwnProcessContext
    _engine: Any = None

    def start(self) -> None:
        """See Executor. There is nothing to start."""

    def _run_here(self, call: EngineCall) -> Any:
        """Return the method's result on this rank, whose device is the current one meanwhile."""
        with current_device(self._context.device):
            if self._engine is None:
                self._engine = load_engine(self._engine_name)(self._context)
            return engine_method(self._engine, call.method)(*call.args, **call.kwargs)

    def close(self) -> None:
        """Release the engine. Idempotent."""
        self._is_closed, self._engine = True, None


class InlineContext(OwnProcessContext):
    """The RankContext of the only rank."""

    def __init__(self, device: str) -> None:
        super().__init__(0, (device,), {})
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask(self, question: object) -> Any:
        """See RankContext. An exception of the caller's function passes through."""
        return self.callbacks.answer(question)

    def receive(self, timeout: float) -> Any:
        try:
            return self.messages.get(timeout=timeout)
        except queue.Empty:
            return None


class InlineExecutor(OwnProcessExecutor):
    """An Executor of one rank on `device`, in this process. Nothing is replayed, since this rank is never restarted.

    `deadline`, in seconds, is passed to the engine only: hangs of this process are not detected. Raises LaunchError.
    """

    kind: Literal["inline"] = "inline"
    _context: InlineContext

    def __init__(self, device: str, engine: str, *, deadline: float = 60.0) -> None:
        super().__init__((device,), engine, deadline)
        self._context = InlineContext(device)

    def _call(self, call: EngineCall) -> list[Any]:
        context = self._context
        before, context.callbacks = context.callbacks, call.callbacks
        messages = context.messages = queue.SimpleQueue()
        call.callbacks.start(lambda rank, value: messages.put(value))
        context.deadline = self._deadline + call.expected
        try:
            return [self._run_here(call)]
        finally:
            context.callbacks = before
