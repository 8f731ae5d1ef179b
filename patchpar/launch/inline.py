"""One rank, in this process: a call is a call. Exceptions come as they are."""

from __future__ import annotations

import queue
import socket
from collections.abc import Mapping
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Literal

from patchpar.errors import LaunchError
from patchpar.launch.executor import Callbacks, OnAsk, OnEvent, OnStart, check_deadline, engine_method, load_engine


class InlineContext:
    """The RankContext of the only rank."""

    rank = 0
    world_size = 1

    def __init__(self, device: str, deadline: float) -> None:
        self.device, self.deadline = device, deadline
        self.links: Mapping[int, socket.socket] | None = {}
        self.waiting = nullcontext()
        self.callbacks = Callbacks()
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.where = ""

    @property
    def wait_limit(self) -> float:
        """See RankContext."""
        return self.deadline

    def emit(self, event: object) -> None:
        """See RankContext."""
        self.callbacks.event(0, event)

    def ask(self, question: object) -> Any:
        """See RankContext. An exception of the caller's own passes through."""
        return self.callbacks.answer(question)

    def hear(self, timeout: float) -> Any:
        """See InteractiveRankContext."""
        try:
            return self.told.get(timeout=timeout)
        except queue.Empty:
            return None

    def mark(self, where: str) -> None:
        """See RankContext."""
        self.where = where


class InlineExecutor:
    """An Executor of one rank on `device`, in this process. The engine is made at the first call.

    `deadline` is what the engine sees as its own; nothing watches this process. Raises LaunchError.
    """

    kind: Literal["inline"] = "inline"
    world_size = 1

    def __init__(self, device: str, engine: str, *, deadline: float = 60.0) -> None:
        self.devices: tuple[str, ...] = (device,)
        self._deadline = check_deadline("deadline", deadline)
        self._context = InlineContext(device, self._deadline)
        self._engine_name = engine
        self._engine: Any = None
        self._is_closed = False

    def start(self) -> None:
        """Nothing to start: the engine is made at the first call."""

    def call(
        self,
        method: str,
        *args: Any,
        on_event: OnEvent | None = None,
        on_ask: OnAsk | None = None,
        on_start: OnStart | None = None,
        replay: object = False,
        expected: float = 0.0,
        **kwargs: Any,
    ) -> list[Any]:
        """See Executor.call. `replay` means nothing here: this rank is not started anew."""
        if self._is_closed:
            raise LaunchError("this executor is closed; make a new one")
        if self._engine is None:
            self._engine = load_engine(self._engine_name)(self._context)
        before = self._context.callbacks
        self._context.callbacks = Callbacks(on_event=on_event, on_ask=on_ask, on_start=on_start)
        told = self._context.told = queue.SimpleQueue()
        self._context.callbacks.start(lambda rank, value: told.put(value))
        self._context.deadline = self._deadline + expected
        try:
            return [engine_method(self._engine, method)(*args, **kwargs)]
        finally:
            self._context.callbacks = before

    def close(self) -> None:
        """Let go of the engine. Harmless when done twice."""
        self._is_closed = True
        self._engine = None

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
