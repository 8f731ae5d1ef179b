"""A transport without other ranks: it notes what a rank sends and waits for, and returns tensors without values.

So the exchanges of every strategy are recorded by the strategy's own code, with no other rank there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart, ExchangeScope, Halo, MomentRows, Received, moments_part
from patchpar.comm.layouts import EdgeLayout
from patchpar.comm.traffic import Booked
from patchpar.comm.transport import FlatParts, Incoming, Messages, Outgoing, Work
from patchpar.comm.transport.message import T
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.models.dry_run.meta_mode import META
from patchpar.pipeline.planner.recorded_copy import RecordedCopy
from patchpar.pipeline.planner.tape_recorder import Expected, TapeRecorder
from patchpar.plan.mesh import Axis

Bytes = Mapping[int, Mapping[str, int]]
"""Of a message to each rank, by kind."""
DEADLINE = 60.0


class RecordingTransport:
    """Notes the messages of rank `rank` in `tape`.

    `joined`: it has operations of several ranks at once, as NCCL has, so that strategies exchange as on GPUs.
    """

    def __init__(self, rank: int, tape: TapeRecorder, *, joined: bool) -> None:
        self.rank, self.device, self.deadline, self.tape = rank, META, DEADLINE, tape
        self.waiting: AbstractContextManager[None] = nullcontext()
        self.collectives = RecordingCollectives(self) if joined else None
        self._label, self._by_kind = "", dict[int, Mapping[str, int]]()

    @contextmanager
    def labelled(self, label: str, by_kind: Bytes) -> Iterator[None]:
        """Context of one exchange of this label. `by_kind`: where it has several kinds, the bytes of each message."""
        before = self._label, self._by_kind
        self._label, self._by_kind = label, dict(by_kind)
        try:
            yield
        finally:
            self._label, self._by_kind = before

    def send_recv(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str
    ) -> "RecordedWork[Messages]":
        """See `Transport`."""
        return self.exchanged(outgoing, incoming, where)

    def exchanged(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str, *, bulk: bool = False
    ) -> "RecordedWork[Messages]":
        """Note one message to each peer of `outgoing`, and return what is expected."""
        for message in outgoing:
            for peer in message.peers:
                self.note(peer, message.num_bytes // len(message.peers), where, bulk=bulk)
        return self.expected(incoming, where)

    def expected(self, incoming: Sequence[Incoming], where: str, filled: Tensor | None = None) -> "RecordedWork[Any]":
        """Return what is expected; the result of the Work is `filled`, of any shape, or the messages."""
        return RecordedWork(self.tape, incoming, where, self._label, filled, joined=self.collectives is not None)

    def note_parts(self, ranks: Sequence[int], parts: FlatParts, where: str, *, bulk: bool) -> None:
        """Note a part for each other rank; where kinds are known, these bytes, without those that align them."""
        for rank, size in zip(ranks, parts.sizes, strict=True):
            if rank != self.rank and size and (rank in self._by_kind or not self._by_kind):
                self.note_own(rank, size * parts.buffer.dtype.itemsize, where, bulk=bulk)

    def note_own(self, peer: int, num_bytes: int, where: str, *, bulk: bool) -> None:
        """Note one message to a peer: the bytes of its kinds where they are known, without those that align them."""
        known = self._by_kind.get(peer)
        self.note(peer, sum(known.values()) if known else num_bytes, where, bulk=bulk)

    def note(self, peer: int, num_bytes: int, where: str, *, bulk: bool) -> None:
        """Note one message. Raises AssertionError if its kinds do not add up to its bytes."""
        by_kind = self._by_kind.get(peer) or {self._label: num_bytes}
        assert sum(by_kind.values()) == num_bytes, f"{where}: {by_kind} in a message of {num_bytes} bytes"
        self.tape.send(peer, by_kind, self._label, where, bulk=bulk)

    def copy_from_host(self, num_bytes: int, where: str) -> RecordedCopy:
        """Note a copy of weights from the host's memory, beside what is computed on a GPU; elsewhere it is at once."""
        return RecordedCopy(self.tape, self.rank, num_bytes, where, at_once=self.collectives is None)

    def settle(self, where: str) -> None:
        """See `Transport`."""

    def poison(self, reason: str) -> None:
        """See `Transport`."""

    def check(self, where: str) -> None:
        """See `Transport`."""

    def close(self) -> None:
        """See `Transport`."""


class RecordingCollectives:
    """See `Collectives`. Each is noted as the messages that it consists of."""

    def __init__(self, transport: RecordingTransport) -> None:
        self._transport = transport

    def form(self, sets: Sequence[tuple[int, ...]], *, symmetric_memory: bool = False) -> None:
        """See `Collectives`."""

    def covers(self, ranks: tuple[int, ...]) -> bool:
        """See `Collectives`."""
        return True

    def all_gather(
        self,
        ranks: tuple[int, ...],
        own: Tensor,
        rows: Tensor,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Tensor]:
        """See `Collectives`; `own` [...] and `rows` [P, ...]."""
        self._note_own(own, incoming, where, bulk=bulk)
        return self._transport.expected(incoming, where, rows)

    def gather_messages(
        self,
        ranks: tuple[int, ...],
        own: Tensor,
        rows: Tensor,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Messages]:
        """See `Collectives`; `own` [...] and `rows` [P, ...]."""
        self._note_own(own, incoming, where, bulk=bulk)
        return self._transport.expected(incoming, where)

    def _note_own(self, own: Tensor, incoming: Sequence[Incoming], where: str, *, bulk: bool) -> None:
        for message in incoming:
            self._transport.note_own(message.peer, own.numel() * own.element_size(), where, bulk=bulk)

    def all_to_all(
        self,
        ranks: tuple[int, ...],
        own: FlatParts,
        into: FlatParts,
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Tensor]:
        """See `Collectives`; flat parts are [elements]."""
        self._transport.note_parts(ranks, own, where, bulk=bulk)
        return self._transport.expected(incoming, where, into.buffer)

    def exchange(
        self,
        ranks: tuple[int, ...],
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
        memory: MessageMemory | None = None,
    ) -> Work[Messages]:
        """See `Collectives`."""
        return self._transport.exchanged(outgoing, incoming, where, bulk=bulk)


class RecordedWork(Work[T]):
    """Messages that have arrived at once, without values. Each wait for one is noted where it is.

    `filled`: the buffer, of any shape, that they are in and that is the result; None for the messages themselves.
    `joined`: by one operation, which is over when all of them are there and all that this rank has sent in it.
    """

    def __init__(
        self,
        tape: TapeRecorder,
        incoming: Sequence[Incoming],
        where: str,
        kind: str,
        filled: Tensor | None,
        *,
        joined: bool,
    ) -> None:
        super().__init__(incoming, where)
        self._tape, self._kind, self._filled, self._joined = tape, kind, filled, joined
        self._expected: list[Expected] = [
            tape.expect(message.peer, message.num_bytes, kind, where) for message in incoming
        ]
        self._begun = tape.begun()
        self._is_over = False

    def _finish(self) -> Any:
        found = super()._finish()
        return found if self._filled is None else self._filled

    def _leave(self) -> None:
        if self._joined and not self._is_over:
            self._is_over = True
            for each in self._expected:
                self._tape.wait(each)
            self._tape.leave(self._begun, self._kind, self.where)

    def _receive(self, index: int) -> list[Tensor]:
        self._leave()
        if not self._joined:
            self._tape.wait(self._expected[index])
        message = self.incoming[index]
        into = message.into or [None] * len(message.specs)
        return [
            torch.empty(spec.shape, dtype=spec.dtype, device=META) if own is None else own
            for spec, own in zip(message.specs, into, strict=True)
        ]


class RecordingCommunicator(Communicator):
    """A communicator that tells its transport the kinds of values in each message.

    `only_kind`: under which all are noted, as those of the VAE are counted; None keeps their own.
    """

    transport: RecordingTransport

    def __init__(self, transport: RecordingTransport) -> None:
        super().__init__(transport)
        self.only_kind: str | None = None
        self._by_kind: Bytes = {}

    def start(
        self, kind: str, where: str, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], scope: ExchangeScope
    ) -> Work[Messages]:
        """See `Communicator`."""
        if scope.to_all:  # from a buffer that is as long as that of the rank which sends most
            self._by_kind = {
                peer: {kind: message.num_bytes // len(message.peers)} for message in outgoing for peer in message.peers
            }
        return super().start(kind, where, outgoing, incoming, scope)

    def exchange(
        self,
        where: str,
        parts: Sequence[ExchangePart],
        label: str = "",
        *,
        bulk: bool = False,
        memory: MessageMemory | None = None,
    ) -> Work[list[Received]]:
        """See `Communicator`."""
        self._by_kind = _by_kind(parts)
        return super().exchange(where, parts, label, bulk=bulk, memory=memory)

    def gather_with_edges(
        self, axis: Axis, where: str, shared: Sequence[Tensor], edges: ExchangePart | None
    ) -> Work[tuple[Received, Halo]]:
        """See `Communicator`."""
        moments = [moments_part(axis, shared)] if shared else []
        self._by_kind = _by_kind(moments if edges is None else [*moments, edges])
        return super().gather_with_edges(axis, where, shared, edges)

    def repeat_moments(
        self, where: str, layout: EdgeLayout, tensors: Sequence[Tensor], *, fused: bool | None = None
    ) -> Work[tuple[MomentRows, Halo]]:
        """See `Communicator`."""
        self._by_kind = layout.bytes_to
        return super().repeat_moments(where, layout, tensors, fused=fused)

    def _start(self, kind: str, where: str, begin: Callable[[], Work[T]], booked: Sequence[Booked]) -> Work[T]:
        by_kind, self._by_kind = self._by_kind, {}
        if self.only_kind is not None:
            kind = self.only_kind
            by_kind = {peer: {kind: sum(found.values())} for peer, found in by_kind.items()}
        with self.transport.labelled(kind, by_kind):
            return super()._start(kind, where, begin, booked)


def _by_kind(parts: Sequence[ExchangePart]) -> dict[int, dict[str, int]]:
    """Return the bytes of an exchange's message to each rank, by kind."""
    found: dict[int, dict[str, int]] = {}
    for part in parts:
        for peers, tensors in part.outgoing:
            for peer in peers:
                kinds = found.setdefault(peer, {})
                kinds[part.kind] = kinds.get(part.kind, 0) + Outgoing((peer,), tensors).num_bytes
    return found
