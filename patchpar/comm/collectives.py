"""Collectives between ranks, for the strategies. All of them use one `Communicator`, which counts the traffic.

    AllGather           every rank's part, in order             K, V; the prediction
    gather_with_edges   moments to all ranks, edge rows to the neighbours, in one message each
    send / receive      one rank to another                     the other guidance branch
    exchange            any of these together, one message to each rank

Each starts at once and returns a `Work`; its `wait()` blocks. Steps and stale values are no concern of this module.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.traffic import CommStats
from patchpar.comm.transport import Incoming, Messages, Outgoing, TensorSpec, Transport, Work
from patchpar.plan.mesh import Axis

Tensors = tuple[Tensor, ...]
Received = Mapping[int, list[Tensor]]  # by sender


@dataclass(frozen=True, slots=True)
class ExchangePart:
    """Values of one kind in an exchange; peers are global ranks.

    `outgoing`: (receivers, tensors). `incoming`: specs by sender. `into`: buffers for a sender's values.
    """

    kind: str
    outgoing: Sequence[tuple[tuple[int, ...], Tensors]]
    incoming: Mapping[int, tuple[TensorSpec, ...]]
    into: Mapping[int, Tensors] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank, counted once per receiver."""
        return sum(Outgoing(peers, tensors).num_bytes for peers, tensors in self.outgoing)

    @property
    def bytes_received(self) -> int:
        """Bytes received by this rank."""
        return sum(spec.num_bytes for specs in self.incoming.values() for spec in specs)

    def kept(self) -> "ExchangePart":
        """Return the same part with copies of its tensors, to be sent later: the originals may change or be freed."""
        outgoing = [(peers, tuple(x.clone() for x in tensors)) for peers, tensors in self.outgoing]
        return replace(self, outgoing=outgoing)


class Communicator:
    """Sends and receives the messages of this rank through one transport and counts them."""

    def __init__(self, transport: Transport, beat: Callable[[str], object] | None = None) -> None:
        self.transport, self.traffic = transport, CommStats()
        self._beat = beat

    def send_recv(
        self, kind: str, where: str, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]
    ) -> Work[Messages]:
        """Start one exchange of `kind` at the exchange point `where`. The Work raises ExchangeError."""
        self.traffic.bytes_sent[kind] += sum(message.num_bytes for message in outgoing)
        self.traffic.bytes_received[kind] += sum(message.num_bytes for message in incoming)
        return self._start(kind, where, outgoing, incoming)

    def exchange(self, where: str, parts: Sequence[ExchangePart], label: str = "") -> Work[list[Received]]:
        """Start an exchange of several kinds: one message to each rank, whatever the number of parts.

        The result of the Work: for each part the received tensors by sender. It raises ExchangeError.
        """
        outgoing, incoming = _outgoing(parts), _incoming(parts)
        for part in parts:
            self.traffic.bytes_sent[part.kind] += part.bytes_sent
            self.traffic.bytes_received[part.kind] += part.bytes_received
        label = label or "+".join(part.kind for part in parts)
        return self._start(label, where, outgoing, incoming).then(partial(_by_part, tuple(parts), incoming))

    def gather_with_edges(
        self, axis: Axis, where: str, shared: Sequence[Tensor], edges: ExchangePart | None
    ) -> Work[tuple[Received, "Halo"]]:
        """Send `shared`, tensors of the same shape on all ranks, to all of the axis and `edges` to the two neighbours.

        One message to each. `edges` comes from `edges_part`. The result of the Work: the other ranks' `shared` by group
        rank, and the neighbours' rows [B, C, ..., r, W]. It raises ExchangeError.
        """
        parts = [moments_part(axis, shared)] if shared else []
        parts += [] if edges is None else [edges]

        def arranged(received: list[Received]) -> tuple[Received, Halo]:
            by_rank = {axis.ranks.index(peer): tensors for peer, tensors in received[0].items()} if shared else {}
            return by_rank, Halo(None, None) if edges is None else halo_of(axis, edges, received[-1])

        return self.exchange(where, parts).then(arranged)

    def _start(
        self, kind: str, where: str, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]
    ) -> Work[Messages]:
        self.beat(where)
        self.traffic.rounds[kind] += 1
        start = time.perf_counter()
        pending = self.transport.send_recv(outgoing, incoming, where)
        self.traffic.note("send", kind, where, start)
        pending.on_wait = partial(self.traffic.waited, kind, where)
        return pending

    def beat(self, where: str) -> None:
        """Report that this rank has reached `where`, without an exchange."""
        if self._beat is not None:
            self._beat(where)

    def send(self, kind: str, where: str, peers: Sequence[int], tensors: Sequence[Tensor]) -> Work[Messages]:
        """Start sending `tensors`, of any shape, to each of `peers` (global ranks). Keep the Work until waited for."""
        return self.send_recv(kind, where, [Outgoing(tuple(peers), tuple(tensors))], [])

    def receive(self, kind: str, where: str, peer: int, specs: Sequence[TensorSpec]) -> Work[Messages]:
        """Start receiving one message from `peer` (a global rank)."""
        return self.send_recv(kind, where, [], [Incoming(peer, tuple(specs))])


def _outgoing(parts: Sequence[ExchangePart]) -> list[Outgoing]:
    """Return one message for each peer; peers that get the same tensors share one."""
    by_peer: dict[int, list[Tensor]] = {}
    for part in parts:
        for peers, tensors in part.outgoing:
            for peer in peers:
                by_peer.setdefault(peer, []).extend(tensors)
    same: dict[tuple[int, ...], tuple[list[int], Tensors]] = {}
    for peer, found in by_peer.items():
        same.setdefault(tuple(map(id, found)), ([], tuple(found)))[0].append(peer)
    return [Outgoing(tuple(peers), tensors) for peers, tensors in same.values()]


def _incoming(parts: Sequence[ExchangePart]) -> list[Incoming]:
    specs: dict[int, list[TensorSpec]] = {}
    into: dict[int, list[Tensor | None]] = {}
    for part in parts:
        for peer, expected in part.incoming.items():
            specs.setdefault(peer, []).extend(expected)
            into.setdefault(peer, []).extend(part.into.get(peer, [None] * len(expected)))
    return [Incoming(peer, tuple(expected), tuple(into[peer])) for peer, expected in specs.items()]


def _by_part(parts: Sequence[ExchangePart], incoming: Sequence[Incoming], received: Messages) -> list[Received]:
    """Return for each part the tensors by sender."""
    whole = {message.peer: iter(tensors) for message, tensors in zip(incoming, received, strict=True)}
    return [{peer: [next(whole[peer]) for _ in specs] for peer, specs in part.incoming.items()} for part in parts]


class AllGather:
    """The tensors of every rank of one axis; parts may differ in size."""

    def __init__(self, comm: Communicator, axis: Axis, kind: str, where: str) -> None:
        self.comm, self.axis, self.kind, self.where = comm, axis, kind, where

    def start(self, own: Sequence[Tensor], specs: Callable[[int], Sequence[TensorSpec]]) -> Work[Messages]:
        """Start sending `own`, tensors of any shape, to all; `specs(group_rank)` returns what each other rank sends.

        The result of the Work: the tensors of every rank in the order of group ranks, `own` included. `arriving` yields
        those of `axis.others`, the nearest first, each as soon as it has arrived. Both raise ExchangeError.
        """
        axis, own_tensors = self.axis, list(own)
        outgoing = [Outgoing(tuple(axis.ranks[group_rank] for group_rank in axis.others), tuple(own))]
        incoming = [Incoming(axis.ranks[group_rank], tuple(specs(group_rank))) for group_rank in axis.others]

        def in_order(received: Messages) -> Messages:
            of_others = dict(zip(axis.others, received, strict=True))
            return [of_others.get(group_rank, own_tensors) for group_rank in range(axis.size)]

        return self.comm.send_recv(self.kind, self.where, outgoing, incoming).then(in_order)

    def same(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in order, all of the same shape as `own`. Blocks. Raises ExchangeError."""
        if self.axis.size == 1:
            return [own]
        spec = TensorSpec.of(own)
        return [tensors[0] for tensors in self.start([own], lambda _: [spec]).wait()]

    def parts(self, own: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """Return the parts of all ranks in order, for `own` [..., sizes[group_rank], ...] along `dim`.

        Parts may differ in size along `dim` only. Blocks. Raises ExchangeError.
        """
        if self.axis.size == 1:
            return [own]
        dim %= own.ndim
        before, after = own.shape[:dim], own.shape[dim + 1 :]

        def specs(group_rank: int) -> list[TensorSpec]:
            return [TensorSpec((*before, sizes[group_rank], *after), own.dtype)]

        return [tensors[0] for tensors in self.start([own], specs).wait()]


def moments_part(axis: Axis, shared: Sequence[Tensor]) -> ExchangePart:
    """Return the exchange of small tensors with all ranks, each of any shape that is the same shape on all."""
    peers = tuple(axis.ranks[group_rank] for group_rank in axis.others)
    specs = tuple(TensorSpec.of(x) for x in shared)
    return ExchangePart("moments", [(peers, tuple(shared))], dict.fromkeys(peers, specs))


class Halo(NamedTuple):
    """The neighbours' rows [B, C, ..., r, W], or columns [B, C, ..., H, r], next to ours; None at an image's edge."""

    before: Tensor | None
    after: Tensor | None


def edges_part(
    axis: Axis,
    first: Tensor | None = None,
    last: Tensor | None = None,
    before: TensorSpec | None = None,
    after: TensorSpec | None = None,
) -> ExchangePart:
    """Return the exchange of edge rows [B, C, ..., r, W], or columns [B, C, ..., H, r], with the two neighbours.

    `first` rows go to the rank before, `last` rows to the rank after; `before` and `after` are what they send. None
    where there is no neighbour, or nothing is needed.
    """
    ranks = {-1: axis.ranks[axis.rank - 1], 1: axis.ranks[(axis.rank + 1) % axis.size]}
    outgoing = [((ranks[side],), (x,)) for side, x in ((-1, first), (1, last)) if x is not None]
    incoming = {ranks[side]: (spec,) for side, spec in ((-1, before), (1, after)) if spec is not None}
    return ExchangePart("halo", outgoing, incoming)


def halo_of(axis: Axis, edges: ExchangePart, found: Received) -> Halo:
    """Return the neighbours' rows out of what was received for an `edges_part`."""

    def rows(group_rank: int) -> Tensor | None:
        peer = axis.ranks[group_rank] if 0 <= group_rank < axis.size else None
        return found[peer][0] if peer is not None and peer in edges.incoming else None

    return Halo(rows(axis.rank - 1), rows(axis.rank + 1))
