"""Ranks that torchrun (or accelerate launch) has started: this process is one of them, and runs the whole script.

Every process makes the same calls. Rank 0's callbacks are called, its replies go to all. After each call the ranks
tell one another how it went, so an exception on one rank is an exception on all, and their scripts stay in step.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from patchpar.errors import LaunchError, WorkerDied, WorkerError, WorkerHung
from patchpar.launch.context import (
    CallAborted,
    Callbacks,
    OnAsk,
    OnEvent,
    check_deadline,
    engine_method,
    load_engine,
)
from patchpar.launch.failures import Failure, take_down
from patchpar.launch.hello import versions
from patchpar.launch.progress import MORE_TIME
from patchpar.launch.wire import encode, pack, unpack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
CALLBACK_SECONDS = 3600.0  # how long rank 0's on_ask may take: nobody stands by to watch, so there has to be a limit
log = logging.getLogger(__name__)


def torchrun_world() -> int | None:
    """How many ranks torchrun has started, of which this process is one; None if this is no such process."""
    if not all(os.environ.get(name, "").isdigit() for name in RANK_VARIABLES):
        return None
    return int(os.environ["WORLD_SIZE"])


class _Control:
    """A gloo group of all ranks, beside the default one, by which they agree.

    Nobody else keeps the group itself, so that `leave` ends its threads. One that still wants to let go of a tensor
    when Python is on its way out has to take Python's lock then, which ends the thread there and, with it, the process:
    "terminate called without an active exception".
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=CALLBACK_SECONDS))

    @property
    def group(self) -> ProcessGroup:
        """The group. Raises LaunchError when it has been left: torch takes no group for the default one."""
        if self._group is None:
            raise LaunchError("this executor is closed; make a new one")
        return self._group

    def leave(self) -> None:
        """Let go of the group. Harmless when done twice."""
        import torch.distributed as dist

        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # the latter: it went with the default group
                dist.destroy_process_group(group)


class TorchrunContext:
    """The RankContext of a rank under torchrun."""

    def __init__(self, rank: int, world_size: int, device: str, control: _Control) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.deadline = self.wait_limit = 0.0
        self.waiting = contextlib.nullcontext()
        self.callbacks = Callbacks()
        self.where = ""
        self.links: Mapping[int, socket.socket] | None = None
        self._control = control

    def emit(self, event: object) -> None:
        """See RankContext. Only rank 0's events are heard: the other ranks are processes of their own."""
        if self.rank == 0:
            self.callbacks.event(0, event)

    def ask(self, question: object) -> Any:
        """See RankContext."""
        if self.rank != 0:
            answered, reply = unpack(self._broadcast(b""))
            if not answered:
                raise CallAborted(str(reply))
            return reply
        try:
            reply = self.callbacks.answer(question)
        except Exception as error:
            self._broadcast(pack(encode((False, f"{type(error).__name__} in the caller's on_ask: {error}"))))
            raise
        self._broadcast(pack(encode((True, reply))))
        return reply

    def mark(self, where: str) -> None:
        """See RankContext."""
        self.where = where

    def _broadcast(self, data: bytes) -> bytes:
        """Rank 0's data, on all ranks."""
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self._control.group)
        body = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(body, 0, group=self._control.group)
        return body.numpy().tobytes() if self.rank else data


class TorchrunExecutor:
    """An Executor of which this process is one rank. To be made by all ranks together.

    Takes the default group of torch.distributed if there is one, else makes it, for the rest of this process: nccl
    where every rank has a GPU of its own, gloo otherwise. `device` overrides this rank's device, for example "cpu" on a
    machine with GPUs.
    Raises LaunchError outside torchrun, or where the ranks differ in versions or engine.
    """

    kind: Literal["torchrun"] = "torchrun"

    def __init__(self, engine: str, *, deadline: float = 60.0, device: str | None = None) -> None:
        import torch.distributed as dist

        self._deadline = check_deadline("deadline", deadline)
        if not dist.is_initialized() and torchrun_world() is None:
            raise LaunchError(f"this process was not started by torchrun: {', '.join(RANK_VARIABLES)} are not set")
        own, backend = _own_device(device)
        if not dist.is_initialized():
            _load_what_keeps_the_default_group()
            dist.init_process_group(backend, timeout=timedelta(seconds=self._deadline))
            # Not at `close`: torchrun's store keeps the old addresses, so a second group in this process would hang.
            atexit.register(_leave_default_group)
        self.world_size = dist.get_world_size()
        self._control = _Control()
        atexit.register(self._control.leave)  # before the default group, without which it cannot be left
        facts = [{**fact} for fact in self._gather({**versions(), "engine": engine, "device": own})]
        self.devices: tuple[str, ...] = tuple(fact.pop("device") for fact in facts)
        for rank, fact in enumerate(facts):
            if fact != facts[0]:
                raise LaunchError(f"rank {rank} differs: it has {fact}, where rank 0 has {facts[0]}")
        self._context = TorchrunContext(dist.get_rank(), self.world_size, own, self._control)
        self._engine_name = engine
        self._engine: Any = None
        self._is_closed = False

    @property
    def rank(self) -> int:
        """The rank that this process is."""
        return self._context.rank

    def start(self) -> None:
        """Nothing to start: torchrun has."""

    def call(
        self,
        method: str,
        *args: Any,
        on_event: OnEvent | None = None,
        on_ask: OnAsk | None = None,
        replay: object = False,
        expected: float = 0.0,
        **kwargs: Any,
    ) -> list[Any]:
        """See Executor.call. `replay` means nothing here: torchrun restarts whole scripts."""
        if self._is_closed:
            raise LaunchError("this executor is closed; make a new one")
        context = self._context
        before, context.callbacks = context.callbacks, Callbacks(on_event=on_event, on_ask=on_ask)
        context.deadline = context.wait_limit = self._deadline + expected
        try:
            result = self._run_and_agree(method, lambda: engine_method(self._made_engine(), method)(*args, **kwargs))
        finally:
            context.callbacks = before
        return [result if rank == context.rank else None for rank in range(self.world_size)]

    def _made_engine(self) -> Any:
        if self._engine is None:
            self._engine = load_engine(self._engine_name)(self._context)
        return self._engine

    def _run_and_agree(self, method: str, work: Callable[[], Any]) -> Any:
        """Run `work` here, then hear how it went elsewhere. Raises if it went wrong anywhere."""
        began = time.monotonic()
        result, own = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  raised again below, when the others know
            own = error
        # All ranks do the same call, so the others need not take much longer than this one did.
        patience = self._context.deadline + 2 * (time.monotonic() - began)
        try:
            failures = self._exchange_failures(None if own is None else take_down(own), patience)
        except WorkerError as error:
            raise own or error from error
        cause = next((rank for rank, failure in enumerate(failures) if _is_cause(failure)), None)
        if own is not None and (cause is None or _is_cause(failures[self.rank])):
            raise own
        failure = None if cause is None else failures[cause]
        if failure is not None:
            where = f"{method}: rank {cause} ({self.devices[cause or 0]})"
            raise failure.as_worker_error(where, cause) from own
        return result

    def _exchange_failures(self, own: Failure | None, patience: float) -> list[Failure | None]:
        """How the call went on each rank. Raises WorkerHung or WorkerDied if one of them does not say."""
        import torch
        import torch.distributed as dist

        flags = [torch.zeros(1, dtype=torch.int32) for _ in range(self.world_size)]
        mine = torch.tensor([own is not None], dtype=torch.int32)
        try:
            work = dist.all_gather(flags, mine, group=self._control.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=patience))
            return self._gather(own) if any(map(int, flags)) else [None] * self.world_size
        except RuntimeError as error:
            if "imed out" in str(error):
                late = f"a rank has not finished within {patience:.0f} s of this one ({self._context.where!r})"
                raise WorkerHung(f"{late}. If it is only slow, give it more time: {MORE_TIME}") from error
            raise WorkerDied(f"a rank has gone: {error}") from error

    def _gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control.group)
        return values

    def close(self) -> None:
        """Let go of the engine. The default group stays, for the next executor. Harmless when done twice."""
        self._is_closed, self._engine = True, None
        self._control.leave()
        atexit.unregister(self._control.leave)

    def __enter__(self) -> TorchrunExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_cause(failure: Failure | None) -> bool:
    """Whether an exception arose by itself, and did not follow from another rank's."""
    return failure is not None and not failure.transport and not failure.type_name.endswith(CallAborted.__name__)


def _load_what_keeps_the_default_group() -> None:
    """Its functions have the default group of when it is loaded as a default argument, and so would keep its threads.

    Diffusers loads it, some time or other. See `_Control` for what such threads do in the end.
    """
    importlib.import_module("torch.distributed.nn.functional")


def _leave_default_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _own_device(device: str | None) -> tuple[str, str]:
    """This rank's device, and the backend for a group of such ranks."""
    import torch

    gpus = torch.cuda.device_count()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device is None:
        device = f"cuda:{local_rank % gpus}" if gpus else "cpu"
    if not device.startswith("cuda"):
        return device, "gloo"
    torch.cuda.set_device(device)
    if ranks_here > gpus:
        log.warning("%d ranks share %d GPUs here, through gloo, which is slow", ranks_here, gpus)
        return device, "gloo"
    return device, "nccl"
