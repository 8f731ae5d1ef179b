"""The interface between a caller and the engines on its ranks: RankContext on a rank, Executor at the caller.

caller --- Executor.call("generate", ...) ---> PipelineRunner.generate(...) on every rank of the call
on_event(rank, event)  <--- context.emit(event)          any rank, asynchronous
on_ask(question)       <--- context.ask(question)        all ranks together; all receive the reply
send(rank, value)      ---> context.receive(timeout)        at any time during a call, to one rank

An engine is any class, named "package.module:Class", created once per rank with its RankContext. Its public methods
are called by name, with the same call on every rank of it, in the rank's main thread. Calls on different ranks run at
the same time, each in its caller's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from patchpar.errors import CallCancelled, LaunchError, PatchparError, PlanError
from patchpar.launch.links import RankLink
from patchpar.launch.message_seal import MessageSeal
from patchpar.launch.rank_locks import RankLocks, checked_ranks
from patchpar.launch.replay import CallEffects
from patchpar.plan.scalars import is_number, plain

OnEvent = Callable[[int, Any], object]
OnAsk = Callable[[Any], Any]
SendToRank = Callable[[int, Any], None]
OnStart = Callable[[SendToRank], object]
Kind = Literal["inline", "local", "torchrun"]
E = TypeVar("E", bound="Executor")
CLOSED = "this executor is closed; make a new one"


class RankContext(Protocol):
    """The rank that an engine runs on, and its connection to the caller."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def device(self) -> str:
        """The torch device of this rank, such as "cpu" or "cuda:1"."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the current call. The first one's questions are answered."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the current call."""

    @property
    def deadline(self) -> float:
        """Seconds that a rank may make no progress during the current call."""

    @property
    def wait_limit(self) -> float:
        """Seconds that a rank may wait for another: more than its deadline if the caller detects which rank is late."""

    @property
    def waiting(self) -> AbstractContextManager[None]:
        """Context manager for waits for another rank, which do not count as a missing progress of this rank."""

    @property
    def links(self) -> Mapping[int, RankLink] | None:
        """The link to each other rank of the current call, if their caller or their host connects them.

        Otherwise None: the ranks communicate through the default group of torch.distributed.
        """

    @property
    def seal(self) -> MessageSeal | None:
        """Authenticates messages through torch.distributed; None where ranks have only sockets of their own host."""

    def emit(self, event: object) -> None:
        """Send a picklable event to the caller's `on_event`; does not wait until it is read.

        Raises TypeError for one that cannot be pickled, as `ask` does.
        """

    def ask(self, question: object) -> Any:
        """Send a question to the caller and return its reply. Collective: all ranks get the reply to the first one's.

        Raises CallAborted on all ranks if the caller's `on_ask` raised or is missing; in the caller's own process the
        exception itself is raised. Raises TypeError for a question that cannot be pickled.
        """

    def beat(self, where: str) -> None:
        """Record that this rank has reached the exchange point `where`. Takes about 0.2 microseconds."""

    def pause_point(self) -> None:
        """Pass a place at which all ranks of a call can end it together; all of them pass the same ones in order.

        Raises CallAborted if the caller cancels the call; in the caller's own process CallCancelled.
        """


class InteractiveRankContext(RankContext, Protocol):
    """A RankContext that receives messages of the caller during a call: all but those of torchrun."""

    def receive(self, timeout: float) -> Any:
        """Return the caller's next message to this rank in this call; None after `timeout` seconds without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The caller's functions for events, questions and the start of a call."""

    on_event: OnEvent | None = None
    on_ask: OnAsk | None = None
    on_start: OnStart | None = None
    is_cancelled: Callable[[], bool] = lambda: False

    def check(self) -> None:
        """Raise CallCancelled if the caller does not want the call any more."""
        if self.is_cancelled():
            raise CallCancelled("this call was cancelled")

    def start(self, send: SendToRank) -> None:
        """Pass the caller the function that sends messages to ranks during the call, from any thread."""
        if self.on_start is not None:
            self.on_start(send)

    def event(self, rank: int, event: object) -> None:
        """Pass an event to the caller's `on_event`, if there is one."""
        if self.on_event is not None:
            self.on_event(rank, event)

    def answer(self, question: object) -> Any:
        """Return the caller's reply. Raises what the caller's function raises, and RuntimeError if there is none."""
        if self.on_ask is None:
            raise RuntimeError(f"the engine sent {question!r} to the caller, but the call was made without on_ask")
        return self.on_ask(question)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """A call of a method of the engine on every rank of `ranks`: see `Executor.call`."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    callbacks: Callbacks
    ranks: tuple[int, ...]
    replay: bool | str | CallEffects
    divides: bool | None
    expected: float


class Executor(ABC):
    """Runs the methods of an engine on every rank. A context manager that closes itself at the end of its block.

    `devices`: the torch device of each rank. `engine`: "package.module:Class". `deadline`: seconds that a rank may make
    no progress during a call. Raises LaunchError.
    """

    kind: Kind
    """Where the ranks run: in this process, in workers that it controls (also on other nodes), or under torchrun."""
    random_widths: tuple[int, ...] = ()
    """`random_width` of each rank's device; empty before the ranks have started, and of a single rank."""

    def __init__(self, devices: Sequence[str], engine: str, deadline: float) -> None:
        self.devices, self._engine_name = tuple(devices), engine
        self._deadline = check_deadline("deadline", deadline)
        self._locks = RankLocks()
        self._is_closed, self._released = False, set[int]()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def in_service(self) -> tuple[int, ...]:
        """The ranks of calls that name none."""
        return tuple(rank for rank in range(self.world_size) if rank not in self._released)

    @property
    def has_groups(self) -> bool:
        """Whether all ranks have to prepare operations of some of them, which communicate through NCCL or its like."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Begin to start the ranks if they are not running, and return at once. `call` does it too."""

    def call(  # noqa: PLR0913 - each is a setting of its own, by name
        self,
        method: str,
        *args: Any,
        on_event: OnEvent | None = None,
        on_ask: OnAsk | None = None,
        on_start: OnStart | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        ranks: Sequence[int] | None = None,
        replay: bool | str | CallEffects = False,
        divides: bool | None = None,
        expected: float = 0.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `method` of the engine on every rank of `ranks` (default: all), and return the results in this order.

        Calls that have ranks in common run one after another. `ranks`: those of one call are in an order of its own,
        since the first one's questions are answered. `divides`: whether these ranks hold parts of one state afterwards,
        which are lost together. Until a call says that they do not, each of them brings the others into its calls,
        behind `ranks`. A call with `replay` is one on all ranks.
        Under torchrun all ranks take part, and only this rank's result is known; the others are None. Events of a rank
        arrive in order, in the caller's thread, and all before this returns. `on_start` gets the function that sends
        messages to ranks during the call; not available under torchrun. It gets another one if workers ended before any
        began the call: others are started then, as before a call, unless the caller has sent a value.
        `is_cancelled` is asked while the call waits for its ranks (after `wake`), and several times a second while it
        runs: it then ends at the ranks' next pause point, with CallCancelled. Not under torchrun.
        `replay`: repeat this call whenever workers are restarted (loading a model, adding a LoRA). A dotted name says
        what the call sets, so that a later call with this name replaces it; see `CallEffects` for more.
        `expected`: seconds without progress that are allowed beyond the executor's deadline. Computing is progress;
        waiting for a download or a slow disk is not.

        Raises the method's exception if all ranks raise the same; WorkerError if only some do; WorkerDied, WorkerHung;
        LaunchError if the ranks cannot be started or are closed; PlanError for an argument that cannot be sent, and for
        ranks that do not exist.
        """
        self._check_open()
        return self._call(
            EngineCall(
                method=method,
                args=args,
                kwargs=kwargs,
                callbacks=Callbacks(on_event=on_event, on_ask=on_ask, on_start=on_start, is_cancelled=is_cancelled),
                ranks=self.in_service if replay or ranks is None else self.check_ranks(ranks),
                replay=replay,
                divides=divides,
                expected=expected,
            )
        )

    def check_ranks(self, ranks: object) -> tuple[int, ...]:
        """Return the ranks of a call. Raises PlanError for a list that is empty, repeats a rank, or names one too many.

        Under torchrun, where every process makes every call, it has to be all of them, in order.
        """
        found = checked_ranks(ranks, self.world_size)
        if self.kind == "torchrun" and found != tuple(range(self.world_size)):
            raise PlanError(f"ranks={ranks!r}: under torchrun every process makes every call: leave it out")
        return found

    def ready(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of `ranks` that can take a call as they are, in this order: not those that have been lost."""
        return tuple(ranks)

    def wake(self) -> None:
        """Let calls that wait for ranks see whether they are cancelled."""
        self._locks.wake()

    @abstractmethod
    def _call(self, call: EngineCall) -> list[Any]:
        """See `call`."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise LaunchError(CLOSED)

    @abstractmethod
    def close(self) -> None:
        """End the ranks. Idempotent."""

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class IdleRank:
    """Return value of a rank that takes no part in a call; it is not counted when exceptions of ranks are compared."""


class CallAborted(PatchparError):
    """Raised by `ask` on the ranks when the caller's function raised. The caller gets its own exception."""


def check_deadline(name: str, seconds: object) -> float:
    """Return `seconds` as a float. Raises LaunchError unless it is finite and above 0."""
    seconds = plain(seconds)
    if not is_number(seconds) or not 0 < seconds < float("inf"):
        raise LaunchError(f"{name}={seconds!r}: it must be a finite number of seconds above 0")
    return float(seconds)
