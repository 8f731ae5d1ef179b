"""A transport to nobody: it notes what a rank sends and waits for, and gives it tensors without values at once.

So the exchanges of every strategy are recorded by the strategy's own code, with no other rank there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.transport import FlatParts, Incoming, Messages, Outgoing, Work
from patchpar.models.dry_run.meta_mode import META
from patchpar.pipeline.planner.tape_recorder import Expected, TapeRecorder

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

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> "RecordedWork":
        """See `Transport`."""
        return self.exchanged(outgoing, incoming, where)

    def exchanged(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str, *, bulk: bool = False
    ) -> "RecordedWork":
        """Note one message to each peer of `outgoing`, and return what is expected."""
        for message in outgoing:
            for peer in message.peers:
                num_bytes = message.num_bytes // len(message.peers)
                self.note(peer, num_bytes, where, bulk=bulk)
        return RecordedWork(self.tape, incoming, where, self._label)

    def note(self, peer: int, num_bytes: int, where: str, *, bulk: bool) -> None:
        """Note one message. Raises AssertionError if its kinds do not add up to its bytes."""
        by_kind = self._by_kind.get(peer) or {self._label: num_bytes}
        assert sum(by_kind.values()) == num_bytes, f"{where}: {by_kind} in a message of {num_bytes} bytes"
        self.tape.send(peer, by_kind, self._label, where, bulk=bulk)

    def settle(self, where: str) -> None:
        """See `Transport`."""

    def poison(self, reason: str) -> None:
        """See `Transport`."""

    def close(self) -> None:
        """See `Transport`."""


class RecordingCollectives:
    """See `Collectives`. Each is noted as the messages that it consists of."""

    def __init__(self, transport: RecordingTransport) -> None:
        self._transport = transport

    def form(self, sets: Sequence[tuple[int, ...]]) -> None:
        """See `Collectives`."""

    def covers(self, ranks: tuple[int, ...]) -> bool:
        """See `Collectives`."""
        return True

    def all_gather(
        self,
        ranks: tuple[int, ...],
        buffers: tuple[Tensor, Tensor],
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Messages]:
        """See `Collectives`."""
        for message in incoming:  # all ranks send as much; in the buffers it is aligned
            self._transport.note(message.peer, message.num_bytes, where, bulk=bulk)
        return self._transport.exchanged([], incoming, where, bulk=bulk)

    def all_to_all(
        self, ranks: tuple[int, ...], own: FlatParts, into: FlatParts, incoming: Sequence[Incoming], where: str
    ) -> Work[Messages]:
        """See `Collectives`."""
        parts = zip(ranks, own.parts(), strict=True)
        outgoing = [Outgoing((rank,), (part,)) for rank, part in parts if rank != self._transport.rank]
        return self._transport.exchanged(outgoing, incoming, where)

    def exchange(
        self,
        ranks: tuple[int, ...],
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        where: str,
        *,
        bulk: bool = False,
    ) -> Work[Messages]:
        """See `Collectives`."""
        return self._transport.exchanged(outgoing, incoming, where, bulk=bulk)


class RecordedWork(Work[Messages]):
    """Messages that have arrived at once, without values. Each wait for one is noted where it is."""

    def __init__(self, tape: TapeRecorder, incoming: Sequence[Incoming], where: str, kind: str) -> None:
        super().__init__(incoming, where)
        self._tape = tape
        self._expected: list[Expected] = [
            tape.expect(message.peer, message.num_bytes, kind, where) for message in incoming
        ]

    def is_here(self, index: int) -> bool:
        """Whether `wait_for` would not block: messages are taken in their order."""
        return True

    def _receive(self, index: int) -> list[Tensor]:
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

    def __init__(self, transport: RecordingTransport, beat: Callable[[str], object] | None = None) -> None:
        super().__init__(transport, beat)
        self.only_kind: str | None = None
        self._by_kind: Bytes = {}

    def exchange(
        self, where: str, parts: Sequence[ExchangePart], label: str = "", *, bulk: bool = False
    ) -> Work[list[Received]]:
        """See `Communicator`."""
        self._by_kind = _by_kind(parts)
        return super().exchange(where, parts, label, bulk=bulk)

    def _start(self, kind: str, where: str, begin: Callable[[], Work[Messages]]) -> Work[Messages]:
        by_kind, self._by_kind = self._by_kind, {}
        if self.only_kind is not None:
            kind, by_kind = self.only_kind, {}
        with self.transport.labelled(kind, by_kind):
            return super()._start(kind, where, begin)


def _by_kind(parts: Sequence[ExchangePart]) -> dict[int, dict[str, int]]:
    """Return the bytes of an exchange's message to each rank, by kind."""
    found: dict[int, dict[str, int]] = {}
    for part in parts:
        for peers, tensors in part.outgoing:
            for peer in peers:
                kinds = found.setdefault(peer, {})
                kinds[part.kind] = kinds.get(part.kind, 0) + Outgoing((peer,), tensors).num_bytes
    return found
