"""What an engine sees of its rank, and what a caller sees of the ranks.

    caller --- Executor.call("generate", ...) ---> PipelineRunner.generate(...) on every rank
    on_event(rank, event)  <--- context.emit(event)          any rank, fire and forget
    on_ask(question)       <--- context.ask(question)        all ranks together; all get the one reply
    tell(rank, value)      ---> context.hear(timeout)        at any time during a call, to one rank

An engine is any class, named "package.module:Class", made once per rank with its RankContext. Its public methods are
called by name, the same call on every rank, in the rank's main thread.
"""

from __future__ import annotations

import importlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from patchpar.errors import LaunchError, PatchparError
from patchpar.launch.replay import CallEffects
from patchpar.plan.scalars import is_number, plain

OnEvent = Callable[[int, Any], object]
OnAsk = Callable[[Any], Any]
Tell = Callable[[int, Any], None]
OnStart = Callable[[Tell], object]
Kind = Literal["inline", "local", "torchrun"]
E = TypeVar("E", bound="Executor")
WAIT_TIMES = 300  # deadlines; a rank that is waited for may work for many of them, see `hang_detection`


class RankContext(Protocol):
    """What an engine knows of the rank it runs on."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    @property
    def device(self) -> str:
        """The torch device of this rank, such as "cpu" or "cuda:1"."""

    @property
    def deadline(self) -> float:
        """How long, in seconds, a rank may go without progress during the present call."""

    @property
    def wait_limit(self) -> float:
        """How long, in seconds, a rank may wait for another: more than its deadline if the caller sees who is late."""

    @property
    def waiting(self) -> AbstractContextManager[None]:
        """To be entered while this rank waits for another, so that the time this takes is not held against it."""

    @property
    def links(self) -> Mapping[int, socket.socket] | None:
        """Where all ranks live on one host, connected sockets: rank 0's to each other rank, theirs to rank 0.

        None elsewhere: those ranks talk through the default group of torch.distributed.
        """

    def emit(self, event: object) -> None:
        """Send a picklable event to the caller's `on_event`; does not wait for it to be read."""

    def ask(self, question: object) -> Any:
        """Put a question to the caller. Every rank asks at the same point; all get the reply to rank 0's question.

        Raises CallAborted on all ranks if the caller's `on_ask` raised, and RuntimeError if it gave none.
        """

    def beat(self, where: str) -> None:
        """Say that this rank has reached the seam `where`. Costs about 0.2 microseconds."""


class InteractiveRankContext(RankContext, Protocol):
    """What an engine knows of a rank that its caller can talk to during a call: all but those of torchrun."""

    def hear(self, timeout: float) -> Any:
        """The next that the caller has told this rank during this call; None if there is none in `timeout` seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """What a caller wants to hear during a call."""

    on_event: OnEvent | None = None
    on_ask: OnAsk | None = None
    on_start: OnStart | None = None

    def start(self, tell: Tell) -> None:
        """Give the caller the means to tell ranks something, for as long as the call lasts, from any thread."""
        if self.on_start is not None:
            self.on_start(tell)

    def event(self, rank: int, event: object) -> None:
        """Hand an event to the caller, if it listens."""
        if self.on_event is not None:
            self.on_event(rank, event)

    def answer(self, question: object) -> Any:
        """The caller's reply. Raises what the caller's function raises, and RuntimeError if there is none."""
        if self.on_ask is None:
            raise RuntimeError(f"the engine asks {question!r}, but the call was made without on_ask")
        return self.on_ask(question)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One call of a method of the engine on every rank: see `Executor.call`."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    callbacks: Callbacks
    replay: bool | str | CallEffects
    expected: float


class Executor(ABC):
    """Runs the methods of an engine on every rank. A context manager, closed at the end of its block.

    `devices`: the torch device of each rank. `engine`: "package.module:Class". `deadline`: seconds that a rank may go
    without progress during a call. Raises LaunchError.
    """

    kind: Kind
    """Where the ranks live: in this process, in workers of this process, or under torchrun."""

    def __init__(self, devices: Sequence[str], engine: str, deadline: float) -> None:
        self.devices, self._engine_name = tuple(devices), engine
        self._deadline = check_deadline("deadline", deadline)
        self._is_closed = False

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.devices)

    @abstractmethod
    def start(self) -> None:
        """Begin to start the ranks, where they are not there already, and return at once. `call` does it too."""

    def call(
        self,
        method: str,
        *args: Any,
        on_event: OnEvent | None = None,
        on_ask: OnAsk | None = None,
        on_start: OnStart | None = None,
        replay: bool | str | CallEffects = False,
        expected: float = 0.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `method` of the engine on every rank and return what each of them returned.

        Under torchrun only this rank's own result is known; the others are None.
        Events of one rank come in order, in the caller's thread, all of them before this returns.
        `on_start` gets the means to tell ranks something during the call; under torchrun there are none.
        `replay`: do this call again whenever workers have to be restarted (loading a model, adding a LoRA). A dotted
        name says what the call sets, so that one which sets the same later takes its place; a Change can say more.
        `expected`: seconds that a rank may go without progress beyond the executor's deadline. Work is progress; a
        download, or a slow disk, is not.

        Raises what the method raises where all ranks raise alike; WorkerError where one did; WorkerDied, WorkerHung;
        LaunchError if the ranks cannot be started or are closed; PlanError for an argument that cannot be sent.
        """
        self._check_open()
        callbacks = Callbacks(on_event=on_event, on_ask=on_ask, on_start=on_start)
        return self._call(
            EngineCall(method=method, args=args, kwargs=kwargs, callbacks=callbacks, replay=replay, expected=expected)
        )

    @abstractmethod
    def _call(self, call: EngineCall) -> list[Any]:
        """See `call`."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise LaunchError("this executor is closed; make a new one")

    @abstractmethod
    def close(self) -> None:
        """End the ranks. Harmless when done twice."""

    def __enter__(self: E) -> E:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class IdleRank:
    """What a method returns on a rank that takes no part in a call, so that what the others raise counts as alike."""


class CallAborted(PatchparError):
    """Raised on the ranks by `ask` when the caller's own function raised. The caller sees its own exception."""


def load_engine(name: str) -> Callable[[RankContext], Any]:
    """The class that "package.module:Class" names. Raises LaunchError if there is none."""
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise LaunchError(f"an engine is named 'package.module:Class', not {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise LaunchError(f"cannot import the engine {name!r}: {error}") from error
    engine = getattr(module, class_name, None)
    if engine is None:
        raise LaunchError(f"module {module_name} has no class {class_name!r} to be the engine")
    return engine


def engine_method(engine: object, method: str) -> Callable[..., Any]:
    """A public method of an engine. Raises AttributeError that names the methods there are."""
    found = None if method.startswith("_") else getattr(engine, method, None)
    if not callable(found):
        public = sorted(name for name in dir(engine) if not name.startswith("_") and callable(getattr(engine, name)))
        raise AttributeError(f"{type(engine).__name__} has no method {method!r}; it has {', '.join(public)}")
    return found


def check_deadline(name: str, seconds: object) -> float:
    """`seconds` if it is a sensible time limit. Raises LaunchError otherwise."""
    seconds = plain(seconds)
    if not is_number(seconds) or not 0 < seconds < float("inf"):
        raise LaunchError(f"{name}={seconds!r}: it must be a number of seconds above 0")
    return float(seconds)


def longest_wait(deadline: float) -> float:
    """Seconds after which a rank gives up waiting for another by itself, where its caller judges much earlier.

    No more than a week: system calls take no longer timeouts.
    """
    return min(WAIT_TIMES * deadline, 7 * 24 * 3600.0)
