"""The executor for ranks that torchrun or accelerate launch has started. Every process runs the whole script.

All processes make the same calls. Rank 0's callbacks are called, and its replies are broadcast. After each call the
ranks exchange their exceptions, so that an exception on one rank is raised on all, and the scripts stay in step.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from patchpar.errors import AuthenticationError, LaunchError, WorkerError, WorkerHung
from patchpar.launch.accelerators import (
    KINDS,
    card_id,
    device_count,
    is_accelerator,
    main_kind,
    random_width,
    release_cached,
    select_device,
)
from patchpar.launch.argument_mismatch import compare, described
from patchpar.launch.control_group import REPLY_SECONDS, Control, LinkControl
from patchpar.launch.default_group import GroupRank, check_default_group, form_group_of_host
from patchpar.launch.executor import CallAborted, EngineCall, IdleRank, check_deadline
from patchpar.launch.fork_guard import change_in_children, check_owner
from patchpar.launch.handshake import versions
from patchpar.launch.hang_detection import MORE_TIME
from patchpar.launch.inline import OwnProcessContext, OwnProcessExecutor
from patchpar.launch.links import RankLink
from patchpar.launch.messages import encode, pack, unpack
from patchpar.launch.remote_errors import RemoteError, is_transport_error, take_down
from patchpar.launch.shared_secret import NetworkTrust
from patchpar.launch.time_limit import longest_wait
from patchpar.launch.torchrun_connection import TorchrunConnection, connect_ranks
from patchpar.launch.torchrun_variables import RANK_VARIABLES, torchrun_world

WAIT_FOR_OTHERS = 1.5  # deadlines for which a rank that has ended a call waits for the others


class TorchrunContext(OwnProcessContext):
    """The RankContext of a rank under torchrun."""

    def __init__(self, rank: int, devices: tuple[str, ...], connection: TorchrunConnection) -> None:
        super().__init__(rank, devices, connection.links, connection.seal)
        self._control = connection.control

    def ask(self, question: object) -> Any:
        """See RankContext."""
        if self.rank != 0:
            answered, reply = unpack(self._control.broadcast(b""))
            if not answered:
                raise CallAborted(str(reply))
            return reply
        try:
            reply = self.callbacks.answer(question)
            message = pack(encode((True, reply)))
        except Exception as error:
            self._control.broadcast(pack(encode((False, f"{type(error).__name__} in the caller's on_ask: {error}"))))
            raise
        self._control.broadcast(message)
        return reply


class TorchrunExecutor(OwnProcessExecutor):
    """An Executor of which this process is one rank. All ranks have to create it together.

    Ranks of one host connect through sockets (see `rendezvous`). Between hosts, and where every rank has its own GPU,
    the default group of torch.distributed is used. If there is none, it is created for the rest of this process (see
    `default_group`). `deadline`: seconds that ranks may wait for one another. `device` overrides this rank's device,
    such as "cpu" on a GPU machine; of a type, such as "cuda", it is the one of LOCAL_RANK. Between hosts all ranks need
    `secret_file`, the same secret (see `authentication`), or `trusted_network`.
    Raises LaunchError outside torchrun, or if ranks do not connect, or differ in versions or engine, or in the secret;
    PlanError for a secret file that cannot be used.
    """

    kind: Literal["torchrun"] = "torchrun"
    _context: TorchrunContext

    def __init__(
        self,
        engine: str,
        *,
        deadline: float = 60.0,
        device: str | None = None,
        secret_file: str | Path | None = None,
        trusted_network: bool = False,
    ) -> None:
        deadline = check_deadline("deadline", deadline)
        device = _own_device(device)
        rank, world_size = _rank_and_world_size()
        timeout = longest_wait(deadline)
        own = GroupRank(rank=rank, world_size=world_size, device=device, deadline=deadline, timeout=timeout)
        connection = connect_ranks(own, deadline, NetworkTrust.of(secret_file, trusted_network=trusted_network))
        self._control, self._links = connection.control, connection.links
        self._owner = os.getpid()
        change_in_children(self)
        # Also of an executor that nobody has closed; and before the default group ends, which the control group needs.
        self._leave = weakref.finalize(self, _leave, self._control, (self._links or {}).values(), self._owner)
        atexit.register(self._leave)
        try:
            self._join(engine, own, connection)
        except BaseException:  # the other ranks would wait for this one
            self._leave()
            raise

    def _join(self, engine: str, own: GroupRank, connection: TorchrunConnection) -> None:
        """Compare this rank's facts with those of the others, and form their default group where they need one."""
        import torch.distributed as dist

        facts = self._facts_of_all(engine, own)
        super().__init__([fact.pop("device") for fact in facts], engine, own.deadline)
        cards = [fact.pop("card") for fact in facts]
        self.random_widths = tuple(int(fact.pop("random width")) for fact in facts)
        for other, fact in enumerate(facts):
            if fact != facts[0]:
                raise LaunchError(f"rank {other} has {fact}, but rank 0 has {facts[0]}: use the same versions")
        if self._links is not None and not dist.is_initialized():
            form_group_of_host(own, cards)
        if not dist.is_initialized():
            connection = connection._replace(seal=None)  # nothing goes through torch.distributed
        check_default_group(own.device, cards)
        self._out_of_step = ""  # why no further call is possible
        self._context = TorchrunContext(own.rank, self.devices, connection)

    def _facts_of_all(self, engine: str, own: GroupRank) -> list[dict[str, str]]:
        """Return of each rank what has to be equal, its device, and the id of its card."""
        import torch

        facts = {**versions(), "torch": str(torch.__version__), "engine": engine, "device": own.device}
        facts |= {"card": card_id(own.device), "random width": str(random_width(own.device))}
        return [json.loads(fact) for fact in self._control.gather(json.dumps(facts).encode(), own.deadline)]

    def after_fork(self) -> None:
        """See Forkable. Otherwise other ranks would consider this one alive while a child of it runs."""
        for link in (self._links or {}).values():
            link.close()
        if isinstance(self._control, LinkControl):
            self._control.leave()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._context.rank

    def _call(self, call: EngineCall) -> list[Any]:
        """See Executor.call. Nothing is replayed, since torchrun restarts whole scripts."""
        if call.callbacks.on_start is not None:
            raise LaunchError("under torchrun no messages can be sent to ranks during a call: use worker processes")
        check_owner(self._owner)
        with self._turn(call):
            try:
                return self._call_here(call)
            except Exception:  # which the ranks have exchanged
                raise
            except BaseException as error:
                self._out_of_step = f"{call.method} was ended by a {type(error).__name__} on rank {self.rank}"
                raise

    def _call_here(self, call: EngineCall) -> list[Any]:
        if self._out_of_step:
            raise LaunchError(
                f"the ranks are out of step, and messages between them may be unread: {self._out_of_step}. Close the "
                "pipeline on all ranks and create it again, or start the job again"
            )
        # Without the deadline: rank 0 may be saving images, and a rank that exits is noticed.
        compare(self._control.gather(described(call.method, call.args, call.kwargs), REPLY_SECONDS))
        context = self._context
        before, context.callbacks = context.callbacks, call.callbacks
        context.deadline = self._deadline + call.expected
        try:
            result = self._run_and_agree(call.method, lambda: self._run_here(call))
        finally:
            context.callbacks = before
        return [result if rank == context.rank else None for rank in range(self.world_size)]

    def _run_and_agree(self, method: str, work: Callable[[], Any]) -> Any:
        """Run `work` on this rank and exchange exceptions with the others. Raises if it failed on any rank."""
        began, before = time.monotonic(), self._context.beats
        result, own = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  raised again below, after the exchange
            own = error
        # All ranks run the same call, so the others should not take much longer than this one did. Where this one has
        # failed they wait for its messages until the deadline, and then have to say so.
        patience = WAIT_FOR_OTHERS * self._context.deadline + 2 * (time.monotonic() - began)
        try:
            failures = self._exchange_failures(None if own is None else take_down(own), patience)
        except WorkerError as error:
            if isinstance(error, WorkerHung):
                self._out_of_step = f"{method}: {error}"
            if own is not None and not isinstance(own, WorkerError) and not is_transport_error(own):
                raise own from error
            more = f". If it is only slow, give it more time: {MORE_TIME}" if isinstance(error, WorkerHung) else ""
            raise type(error)(f"{error} ({method}; {self._where()}){more}", rank=error.rank) from own or error
        if any(failures):
            points = b"" if isinstance(result, IdleRank) else str(self._context.beats - before).encode()
            self._out_of_step = f"{method} failed, and not every rank has said how far it came"  # if this one raises
            self._out_of_step = _step_lost(method, failures, self._control.gather(points, patience))
        cause = next((rank for rank, failure in enumerate(failures) if _is_cause(failure)), None)
        if own is not None and (cause is None or _is_cause(failures[self.rank])):
            raise own
        failure = None if cause is None else failures[cause]
        if failure is not None:
            where = f"{method}: rank {cause} ({self.devices[cause or 0]})"
            raise failure.as_worker_error(where, cause) from own
        return result

    def _where(self) -> str:
        where = self._context.where
        return f"rank {self.rank} was {f'at {where!r}' if where else 'before its first exchange point'}"

    def _exchange_failures(self, own: RemoteError | None, patience: float) -> list[RemoteError | None]:
        """Return each rank's exception, None where it succeeded. Raises WorkerHung or WorkerDied."""
        found = self._control.gather(b"" if own is None else own.as_json(), patience)
        return [RemoteError.of_json(data) if data else None for data in found]

    def close(self) -> None:
        """Release the engine. The default group stays for the next executor. Idempotent."""
        super().close()
        if is_accelerator(self._context.device):  # graphs in cycles too: no group of NCCL ends before them
            import torch

            release_cached(torch.device(self._context.device))
        self._leave()
        atexit.unregister(self._leave)


def _leave(control: Control, links: Iterable[RankLink], owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not leave the group
        control.leave()
        for link in links:
            link.close()


def _step_lost(method: str, failures: Sequence[RemoteError | None], points: Sequence[bytes]) -> str:
    """Return why ranks that failed in a call cannot make another one; empty if they can.

    `points`: how many exchange points each rank has reached in the call, empty for ranks that took no part. Ranks that
    have reached equally many have no message in flight between them.
    """
    rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
    broken = any(failure is not None and (failure.transport or _is_refusal(failure)) for failure in failures)
    if not broken and len({count for count in points if count}) < 2:
        return ""
    return f"{method} failed on rank {rank} between two exchanges ({failure.headline()})"


def _rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size. Raises LaunchError outside torchrun, and for a rank beyond the world size."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world_size = torchrun_world()
    if world_size is None:
        raise LaunchError(f"this process was not started by torchrun: {', '.join(RANK_VARIABLES)} are not set")
    rank = int(os.environ["RANK"])
    if rank >= world_size:
        raise LaunchError(f"RANK={rank} and WORLD_SIZE={world_size}: ranks go from 0 to WORLD_SIZE - 1, of all nodes")
    return rank, world_size


def _is_refusal(failure: RemoteError) -> bool:
    """Return whether a rank has refused a message as not authentic, after which nothing between ranks is in step."""
    return failure.type_name.endswith(AuthenticationError.__name__)


def _is_cause(failure: RemoteError | None) -> bool:
    """Return whether an exception is no consequence of another rank's."""
    return failure is not None and not failure.transport and not failure.type_name.endswith(CallAborted.__name__)


def _own_device(device: str | None) -> str:
    """Return this rank's device, which is the current one from now on. `device`: what the script asks for.

    Raises LaunchError for a type of device that this process has none of.
    """
    kind = main_kind() if device is None else device
    cards = device_count(kind) if kind in KINDS else 0
    if kind in KINDS and not cards:
        raise LaunchError(f"device={device!r}: this process sees no device of this type: use 'cpu', or leave it out")
    own = f"{kind}:{int(os.environ.get('LOCAL_RANK', '0')) % cards}" if cards else device or "cpu"
    select_device(own)
    return own
