"""Copies of a network on several devices of one process, a thread for each, that compute its calls together.

team = Team([network, copy_on_another_device])
noise = team(latents, t, text)                     whole tensors in, whole tensors out, on the first device
team.close()

There is no other process and no NCCL. While kernels are launched, threads take turns at Python's lock: processes
(`ParallelPipeline`, `shard_module`) launch faster where steps are short.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchpar.comm.pytree import map_tensors
from patchpar.comm.transport import Mailboxes, ThreadTransport
from patchpar.errors import ExchangeError, PlanError
from patchpar.launch.accelerators import current_device, current_streams, in_stream
from patchpar.pipeline.module.options import ModuleOptions
from patchpar.pipeline.module.sharded_module import ShardedModule, device_of
from patchpar.plan.plan import Plan
from patchpar.shard.unsupported_model import refuse_gradients

GRACE = 10.0
"""Seconds beyond the deadline after which a thread that has not come back is not waited for any more."""


class Team:
    """Copies of one network with the same weights, each on its device, in eval mode: its calls are split between them.

    A call of a copy itself stays a plain one.

    `patch`: their number, as a check. `strategy`, `split`, `ratio`: see Plan. `verify`: compare the split call with
    the plain one at first use; a folder keeps results there. `ignore`: names of arguments in which numbers and texts
    differ from call to call without effect on how a call can be split. `deadline`: seconds that a copy may wait for
    another. Call `begin` before each image and `step` after each step of the scheduler, which strategies with values
    of the step before need. One call runs at a time. Raises PlanError, also for a copy that is
    in a team that is not closed, and LaunchError.
    """

    def __init__(  # noqa: PLR0913 - each is a setting of its own, by name
        self,
        replicas: Sequence[nn.Module],
        *,
        patch: int | None = None,
        strategy: Any = "exact",
        split: str = "auto",
        ratio: Iterable[int] = (),
        verify: bool | Path = True,
        ignore: Iterable[str] = (),
        deadline: float = 60.0,
    ) -> None:
        self.replicas = tuple(replicas)
        size = len(self.replicas)
        if not size or patch not in (None, size):
            raise PlanError(f"patch={patch} with {size} copies of the network: give one copy for each device")
        _refuse_shared(self.replicas)
        plan = Plan(patch=size, strategy=strategy, split=split, ratio=tuple(ratio))
        options = ModuleOptions.of(plan, verify=verify, ignore=ignore, deadline=deadline)
        self._lock = threading.Lock()
        self._mailboxes = Mailboxes([device_of(each) for each in self.replicas])
        self._transports = [ThreadTransport(rank, self._mailboxes, options.deadline) for rank in range(size)]
        self._handles: list[ShardedModule] = []
        self._stuck, self._is_closed = "", False
        self._mode: _CallerMode | None = None  # of the last call
        try:
            for replica, transport in zip(self.replicas, self._transports, strict=True):
                self._handles.append(ShardedModule(replica, transport, tuple(range(size)), options))
        except BaseException:
            for handle in self._handles:
                handle.remove()
            raise
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"patchpar-{rank}") for rank in range(size)]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each copy."""
        return self._mailboxes.devices

    @property
    def error(self) -> float | None:
        """Relative error of the split call against the plain one at first use; None before, and where not compared."""
        return self._handles[0].error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the network returns, on the first device. Arguments are copied to each device.

        Raises UnsupportedModel, VerificationError, PlanError, ExchangeError, and what the network raises.
        """
        refuse_gradients(self.replicas[0], f"patch={len(self.replicas)}", (args, kwargs))

        def call(rank: int) -> Any:
            return self._handles[rank].call(self.replicas[rank].forward, self._own(rank, args), self._own(rank, kwargs))

        return self._on_all(call)[0]

    def begin(self) -> None:
        """Begin an image. Raises ExchangeError, and PlanError once it is closed, as all that follows."""
        self._on_all(lambda rank: self._handles[rank].begin())

    def step(self) -> None:
        """End a step of the scheduler, in which the network may have been called several times."""
        self._on_all(lambda rank: self._handles[rank].step())

    def control(self, *, exchange: str) -> None:
        """Set the exchange to "off", which gives wrong results, as the negative control of tests; "on" is right."""
        for handle in self._handles:
            handle.control(exchange=exchange)

    def close(self) -> None:
        """End the threads and leave the networks as they were. Idempotent."""
        self._is_closed = True
        for thread in self._threads:
            thread.shutdown(wait=not self._stuck)
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- threads ------------------------------------------------------------------------------------------------

    def _own(self, rank: int, tree: Any) -> Any:
        """Return arguments on the device of a rank, in lists and dicts of its own."""
        device = self.devices[rank]
        return map_tensors(lambda x: x.to(device), tree)

    def _on_all(self, run: Callable[[int], Any]) -> list[Any]:
        """Return what `run` returns on each rank's thread. Raises the error of the rank that failed first."""
        with self._lock:
            if self._is_closed:
                raise PlanError("this team is closed: make a new one")
            if self._stuck:
                raise ExchangeError(f"{self._stuck}: close this team and make a new one")
            mode = _CallerMode.now(self.devices)
            mode.follow(self._mode)
            self._mode = mode
            futures = [
                thread.submit(copy_context().run, self._run, mode, run, rank)
                for rank, thread in enumerate(self._threads)
            ]
            errors = self._errors_of(futures)
            if errors:
                self._recover()
                raise errors[0]
            return [future.result() for future in futures]

    def _run(self, mode: _CallerMode, run: Callable[[int], Any], rank: int) -> Any:
        try:
            with mode.on(self.devices[rank]):
                return run(rank)
        except BaseException as error:
            if not isinstance(error, ExchangeError):  # of which the others have been told
                self._mailboxes.fail(f"rank {rank} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise

    def _errors_of(self, futures: Sequence[Future[Any]]) -> list[BaseException]:
        """Wait for all ranks and return their errors, those that are no consequence of others first."""
        _, left = wait(futures, return_when=FIRST_EXCEPTION)
        if left:
            limit = max(transport.deadline for transport in self._transports)
            _, left = wait(futures, timeout=limit + GRACE)
        if left:
            ranks = [rank for rank, future in enumerate(futures) if future in left]
            self._stuck = f"the threads of ranks {ranks} have not come back {limit + GRACE:g} s after another failed"
            self._mailboxes.fail(self._stuck)
        found = [error for future in futures if future.done() and (error := future.exception()) is not None]
        return sorted(found, key=lambda error: isinstance(error, ExchangeError))

    def _recover(self) -> None:
        """Begin anew after an error: no thread runs, and all that ranks had sent or stored is lost."""
        if self._stuck:
            return
        for transport in self._transports:
            transport.recover()
        self._mailboxes.clear()
        for handle in self._handles:
            handle.discard()


class _CallerMode:
    """What torch keeps by thread and a call depends on: gradients, inference mode, autocast, streams of devices."""

    def __init__(self, inference: bool, autocast: dict[str, torch.dtype], streams: Sequence[Any]) -> None:
        self._inference, self._autocast, self._streams = inference, autocast, streams

    @classmethod
    def now(cls, devices: Sequence[torch.device]) -> _CallerMode:
        """Return the modes of this thread."""
        kinds = {device.type for device in devices}
        autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        return cls(torch.is_inference_mode_enabled(), autocast, current_streams(devices))

    def follow(self, before: _CallerMode | None) -> None:
        """Let streams wait for those of the call before, in which values were computed that ranks have kept."""
        for stream, earlier in zip(self._streams, () if before is None else before._streams, strict=False):
            if stream != earlier:
                stream.wait_stream(earlier)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Context with these modes, without gradients, in which `device` is the current one."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:  # in which arguments are computed and the result is used
                stack.enter_context(in_stream(stream))
            stack.enter_context(current_device(str(device)))
            stack.enter_context(torch.inference_mode() if self._inference else torch.no_grad())
            if device.type in self._autocast:
                stack.enter_context(torch.autocast(device.type, self._autocast[device.type]))
            yield


def _refuse_shared(replicas: Sequence[nn.Module]) -> None:
    """Raise PlanError where two copies share a layer or a weight: threads would write into each other's."""
    for one, other in combinations(replicas, 2):
        if {id(each) for each in one.modules()} & {id(each) for each in other.modules()}:
            raise PlanError("two copies of the network are one object: make another with copy.deepcopy(network)")
        if type(one) is not type(other):
            raise PlanError(f"the copies are a {type(one).__name__} and a {type(other).__name__}: give copies of one")


def replicate(module: nn.Module, devices: Sequence[str | torch.device]) -> list[nn.Module]:
    """Return `module`, which is on the first of `devices`, and a deep copy of it on each other one.

    Raises PlanError if it is elsewhere.
    """
    first = torch.device(devices[0])
    if device_of(module) != first:
        raise PlanError(f"the network is on {device_of(module)}, and the first device is {first}: move it there before")
    return [module, *(copy.deepcopy(module).to(device) for device in devices[1:])]
