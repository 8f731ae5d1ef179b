"""Executors of ranks that run in this process: their base, and that of a single rank, where a call is a plain one."""

import queue
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from patchpar.launch.accelerators import current_device
from patchpar.launch.engines import engine_method, load_engine
from patchpar.launch.executor import Callbacks, EngineCall, Executor
from patchpar.launch.links import PeerLink
from patchpar.launch.message_seal import MessageSeal


class OwnProcessContext(ABC):
    """Base of the RankContexts of ranks that run in this process."""

    def __init__(
        self,
        rank: int,
        devices: tuple[str, ...],
        links: Mapping[int, PeerLink] | None,
        seal: MessageSeal | None = None,
    ) -> None:
        self.rank, self.world_size, self.device, self.links = rank, len(devices), devices[rank], links
        self.ranks = tuple(range(self.world_size))
        self.seal = seal
        self.deadline = 0.0  # before the first call
        self.waiting = nullcontext()
        self.callbacks = Callbacks()
        self.where, self.beats = "", 0  # the last exchange point, and the number of those that were reached

    @property
    def is_first(self) -> bool:
        return self.rank == 0

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

    def pause_point(self) -> None:
        self.callbacks.check()


class OwnProcessExecutor(Executor):
    """An Executor of which this process is a rank. The engine is created at the first call."""

    _context: OwnProcessContext
    _engine: Any = None

    @contextmanager
    def _turn(self, call: EngineCall) -> Iterator[None]:
        """Hold the ranks of a call, unless this thread has them: functions of the caller may call the engine."""
        if self._locks.are_held_here:
            yield
        else:
            with self._locks.holding(call.ranks, call.callbacks.check):
                self._check_open()
                yield

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
        self.messages: queue.Queue[Any] = queue.Queue()

    def ask(self, question: object) -> Any:
        """See RankContext. An exception of the caller's function passes through."""
        return self.callbacks.answer(question)

    def receive(self, timeout: float) -> Any:
        """See RankContext. A SimpleQueue waits for ever now and then, where its timeout is over before it waits."""
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
        with self._turn(call):
            return [self._run_with(call)]

    def _run_with(self, call: EngineCall) -> Any:
        """Return the method's result, with the callbacks and messages of this call."""
        context = self._context
        outer = context.callbacks, context.messages, context.deadline  # of a call whose functions make this one
        context.callbacks, messages = call.callbacks, queue.Queue[Any]()
        context.messages, context.deadline = messages, self._deadline + call.expected
        try:
            call.callbacks.start(lambda rank, value: messages.put(value))
            return self._run_here(call)
        finally:
            context.callbacks, context.messages, context.deadline = outer
