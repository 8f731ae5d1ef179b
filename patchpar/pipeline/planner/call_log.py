"""Everything that a recorded call notes, in order, so that it can be noted again with other attention between ranks.

Plans that differ only in how ranks exchange keys and values have the same call, but for one function: exact attention
between ranks, `attend_together`. The log has what that function noted apart (`LoggedAttention`), with the forms of its
arguments and of its result. Exact attention keeps nothing, and nobody else asks how it exchanges.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import META
from patchpar.pipeline.planner.tape_recorder import Begun, Expected, TapeRecorder
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.mesh import Axis
from patchpar.plan.replay.tape import Operator
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.attention.sharded_qkv import ShardedQKV


@dataclass(frozen=True, slots=True)
class Noted:
    """A call of a method of the tape or of the memory. `result`: the message or operation that it returned."""

    of: type
    name: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None


@dataclass(frozen=True, slots=True)
class MetaForm:
    """All that operators on the meta device see of a tensor of any shape."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "MetaForm":
        """Return the form of a tensor of any shape."""
        return cls(tuple(x.shape), x.stride(), x.dtype)

    def empty(self) -> Tensor:
        """Return such a tensor, of any shape, without values."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=META)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """The arguments of exact attention between the ranks of an axis: see `ShardedQKV`."""

    axis: Axis
    tensors: tuple[MetaForm, MetaForm, MetaForm]
    mask: MetaForm | None
    sizes: tuple[int, ...]
    group_rank: int
    common: int
    common_asks: bool
    scale: float | None

    @classmethod
    def of(cls, axis: Axis, shared: ShardedQKV) -> "AttentionForm | None":
        """Return the form of a call; None where what it does may depend on more: values, a kernel, autocast."""
        tensors = [shared.q_BNlD, shared.k_BMlD, shared.v_BMlD]
        given = tensors if shared.mask is None else [*tensors, shared.mask]
        plain = all(type(x) is Tensor and x.is_meta for x in given)
        if not plain or shared.kernel is not None or torch.is_autocast_enabled("cpu"):
            return None
        query, key, value = map(MetaForm.of, tensors)
        return cls(
            axis=axis,
            tensors=(query, key, value),
            mask=None if shared.mask is None else MetaForm.of(shared.mask),
            sizes=tuple(shared.sizes),
            group_rank=shared.group_rank,
            common=shared.common,
            common_asks=shared.common_asks,
            scale=shared.scale,
        )

    def shared(self) -> ShardedQKV:
        """Return such arguments without values."""
        query, key, value = (each.empty() for each in self.tensors)
        return ShardedQKV(
            q_BNlD=query,
            k_BMlD=key,
            v_BMlD=value,
            sizes=self.sizes,
            group_rank=self.group_rank,
            common=self.common,
            common_asks=self.common_asks,
            mask=None if self.mask is None else self.mask.empty(),
            scale=self.scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAttention:
    """What exact attention at `where` has noted.

    `form`: None where another way of exchange may not be noted in its place. `result`: the form of its result, the
    offset in its storage, and the bytes of that, which alone is left of what it allocated; None if more is.
    """

    where: str
    form: AttentionForm | None
    events: tuple["Event", ...]
    result: tuple[MetaForm, int, int] | None


Event = Operator | int | Noted | LoggedAttention
"""An int: bytes that were allocated, or freed where it is below 0."""


@dataclass(slots=True)
class CallLog:
    """The events of the call since `begin`, and the bytes that were alive then. `is_whole`: all was noted in it.

    `calls`: the number of times that it has begun.
    """

    events: list[Event] = field(default_factory=list)
    alive: int = 0
    is_whole: bool = True
    calls: int = 0

    def begin(self, alive: int) -> None:
        """Begin a call; forget the one before."""
        self.events, self.alive, self.is_whole, self.calls = [], alive, True, self.calls + 1

    def attend(
        self, memory: LiveBytes, keys: AttentionMode, comm: Communicator, axis: Axis, where: str, shared: ShardedQKV
    ) -> Tensor:
        """Return the output [B, N, c + l, D] of `attend_together`, whose events are noted as one."""
        outside, self.events = self.events, []
        before = memory.storages
        found = attend_together(keys, comm, axis, where, shared)
        left, inside = memory.storages ^ before, tuple(self.events)
        is_new = left == {id(found.untyped_storage())} and type(found) is Tensor and found.is_meta
        result = (MetaForm.of(found), int(found.storage_offset()), found.untyped_storage().nbytes()) if is_new else None
        form = AttentionForm.of(axis, shared)
        self.events = outside
        outside.append(LoggedAttention(where=where, form=form, events=inside, result=result))
        return found


class LoggedTape(TapeRecorder):
    """A tape whose entries are events of a log, too."""

    def __init__(self, log: CallLog, *, joined: bool) -> None:
        self._log = log
        super().__init__(joined=joined)

    def operator(self, found: Operator) -> None:
        """See TapeRecorder."""
        self._log.events.append(found)
        super().operator(found)

    def send(self, peer: int, by_kind: Mapping[str, int], label: str, where: str, *, bulk: bool = False) -> None:
        """See TapeRecorder."""
        self._log.events.append(Noted(TapeRecorder, "send", (peer, dict(by_kind), label, where), {"bulk": bulk}))
        super().send(peer, by_kind, label, where, bulk=bulk)

    def copy(self, rank: int, num_bytes: int, where: str) -> Expected:
        """See TapeRecorder."""
        self._log.is_whole = False  # they go on from call to call
        return super().copy(rank, num_bytes, where)

    def begun(self) -> Begun:
        """See TapeRecorder."""
        return self._note("begun", result=super().begun())

    def expect(self, sender: int, num_bytes: int, kind: str, where: str) -> Expected:
        """See TapeRecorder."""
        found = super().expect(sender, num_bytes, kind, where)
        return self._note("expect", sender, num_bytes, kind, where, result=found)

    def wait(self, message: Expected) -> None:
        """See TapeRecorder."""
        self._log.is_whole &= message.call == self._call
        self._note("wait", message)
        super().wait(message)

    def leave(self, begun: Begun, kind: str, where: str) -> None:
        """See TapeRecorder."""
        self._log.is_whole &= begun.call == self._call
        self._note("leave", begun, kind, where)
        super().leave(begun, kind, where)

    def block(self, path: str) -> None:
        """See TapeRecorder."""
        self._note("block", path)
        super().block(path)

    def denoiser(self) -> None:
        """See TapeRecorder."""
        self._note("denoiser")
        super().denoiser()

    def conditioner(self) -> None:
        """See TapeRecorder."""
        self._note("conditioner")
        super().conditioner()

    def step_ended(self) -> None:
        """See TapeRecorder."""
        self._note("step_ended")
        super().step_ended()

    def _note(self, name: str, *args: Any, result: Any = None) -> Any:
        self._log.events.append(Noted(TapeRecorder, name, args, result=result))
        return result


class LoggedBytes(LiveBytes):
    """Live bytes whose changes are events of a log, too."""

    def __init__(self, log: CallLog, phase: str) -> None:
        self._log = log
        super().__init__(phase)

    def begin(self, phase: str) -> None:
        """See LiveBytes."""
        self._log.begin(self.alive)
        super().begin(phase)

    def change(self, num_bytes: int) -> None:
        """See LiveBytes."""
        self._log.events.append(num_bytes)
        super().change(num_bytes)

    def enter(self, phase: str) -> None:
        """See LiveBytes."""
        self._log.events.append(Noted(LiveBytes, "enter", (phase,)))
        super().enter(phase)

    def merge(self, phase: str, into: str) -> None:
        """See LiveBytes."""
        self._log.events.append(Noted(LiveBytes, "merge", (phase, into)))
        super().merge(phase, into)

    def work(self, num_bytes: int) -> None:
        """See LiveBytes."""
        if num_bytes:
            self._log.events.append(Noted(LiveBytes, "work", (num_bytes,)))
        super().work(num_bytes)
