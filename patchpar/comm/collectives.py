"""What travels between ranks, as the strategies see it. All of it goes through one `Communicator`, which counts.

    AllGather           every place's share, in order    K,V; the prediction
    gather_with_edges   moments to everyone, edge rows to neighbours, in one message each
    send / receive      one rank to another              the other guidance branch
    exchange            any of these together, one message to each rank

Each starts at once and returns a `Work`, to be waited for. Nothing here knows about steps or staleness.
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

    `outgoing`: tensors and who gets them. `incoming`: specs by sender. `into`: where a sender's values are to be put.
    """

    kind: str
    outgoing: Sequence[tuple[tuple[int, ...], Tensors]]
    incoming: Mapping[int, tuple[TensorSpec, ...]]
    into: Mapping[int, Tensors] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave this rank, once per receiver."""
        return sum(Outgoing(peers, tensors).num_bytes for peers, tensors in self.outgoing)

    @property
    def bytes_received(self) -> int:
        """Bytes that come to this rank."""
        return sum(spec.num_bytes for specs in self.incoming.values() for spec in specs)

    def kept(self) -> "ExchangePart":
        """The same with tensors of their own, to be sent later, whatever becomes of those that they are parts of."""
        outgoing = [(peers, tuple(x.clone() for x in tensors)) for peers, tensors in self.outgoing]
        return replace(self, outgoing=outgoing)


class Communicator:
    """The one way out of this rank."""

    def __init__(self, transport: Transport, beat: Callable[[str], object] | None = None) -> None:
        self.transport, self.traffic = transport, CommStats()
        self._beat = beat

    def send_recv(
        self, kind: str, where: str, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]
    ) -> Work[Messages]:
        """Start one exchange of `kind` at the exchange point `where`."""
        self.traffic.bytes_sent[kind] += sum(message.num_bytes for message in outgoing)
        self.traffic.bytes_received[kind] += sum(message.num_bytes for message in incoming)
        return self._start(kind, where, outgoing, incoming)

    def exchange(self, where: str, parts: Sequence[ExchangePart], label: str = "") -> Work[list[Received]]:
        """Start an exchange of several kinds: one message to each rank, whatever the number of parts.

        What is returned waits for the tensors of each part, by sender.
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
        """Send small values to all places of the axis and edge rows (`edges_part`) to the two neighbours.

        One message to each. What is returned waits for (`shared` of the others by place, the neighbours' rows).
        """
        parts = [moments_part(axis, shared)] if shared else []
        parts += [] if edges is None else [edges]

        def arranged(found: list[Received]) -> tuple[Received, Halo]:
            by_rank = {axis.ranks.index(peer): tensors for peer, tensors in found[0].items()} if shared else {}
            return by_rank, Halo(None, None) if edges is None else halo_of(axis, edges, found[-1])

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
        """Show that this rank has come to `where`, without an exchange."""
        if self._beat is not None:
            self._beat(where)

    def send(self, kind: str, where: str, peers: Sequence[int], tensors: Sequence[Tensor]) -> Work[Messages]:
        """Start sending `tensors` to each of `peers` (global ranks). Hold the result until it has been waited for."""
        return self.send_recv(kind, where, [Outgoing(tuple(peers), tuple(tensors))], [])

    def receive(self, kind: str, where: str, peer: int, specs: Sequence[TensorSpec]) -> Work[Messages]:
        """Expect one message from `peer` (a global rank)."""
        return self.send_recv(kind, where, [], [Incoming(peer, tuple(specs))])


def _outgoing(parts: Sequence[ExchangePart]) -> list[Outgoing]:
    """One message for each peer; peers that get the very same tensors share one."""
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
    """Of each part, the tensors by sender."""
    whole = {message.peer: iter(tensors) for message, tensors in zip(incoming, received, strict=True)}
    return [{peer: [next(whole[peer]) for _ in specs] for peer, specs in part.incoming.items()} for part in parts]


class AllGather:
    """Every place's tensors on one axis; shares may differ in size."""

    def __init__(self, comm: Communicator, axis: Axis, kind: str, where: str) -> None:
        self.comm, self.axis, self.kind, self.where = comm, axis, kind, where

    def start(self, own: Sequence[Tensor], specs: Callable[[int], Sequence[TensorSpec]]) -> Work[Messages]:
        """Send `own` to everyone; `specs(group_rank)` tells what comes from each other place.

        What is returned waits for the tensors of every place, own included, in order; `arriving` gives those of
        `axis.others`, the nearest first, each as soon as it is here.
        """
        axis, own_tensors = self.axis, list(own)
        outgoing = [Outgoing(tuple(axis.ranks[group_rank] for group_rank in axis.others), tuple(own))]
        incoming = [Incoming(axis.ranks[group_rank], tuple(specs(group_rank))) for group_rank in axis.others]

        def in_order(received: Messages) -> Messages:
            of_others = dict(zip(axis.others, received, strict=True))
            return [of_others.get(group_rank, own_tensors) for group_rank in range(axis.size)]

        return self.comm.send_recv(self.kind, self.where, outgoing, incoming).then(in_order)

    def same(self, own: Tensor) -> list[Tensor]:
        """Tensors of one shape from every place, in order, now."""
        if self.axis.size == 1:
            return [own]
        spec = TensorSpec.of(own)
        return [tensors[0] for tensors in self.start([own], lambda _: [spec]).wait()]

    def parts(self, own: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors whose size along `dim` differs by place, in order, now."""
        if self.axis.size == 1:
            return [own]
        dim %= own.ndim
        before, after = own.shape[:dim], own.shape[dim + 1 :]

        def specs(group_rank: int) -> list[TensorSpec]:
            return [TensorSpec((*before, sizes[group_rank], *after), own.dtype)]

        return [tensors[0] for tensors in self.start([own], specs).wait()]


def moments_part(axis: Axis, shared: Sequence[Tensor]) -> ExchangePart:
    """Small values of one shape, to and from everyone."""
    peers = tuple(axis.ranks[group_rank] for group_rank in axis.others)
    specs = tuple(TensorSpec.of(x) for x in shared)
    return ExchangePart("moments", [(peers, tuple(shared))], dict.fromkeys(peers, specs))


class Halo(NamedTuple):
    """Rows of the neighbours next to ours; None at an edge of the picture."""

    before: Tensor | None
    after: Tensor | None


def edges_part(
    axis: Axis,
    first: Tensor | None = None,
    last: Tensor | None = None,
    before: TensorSpec | None = None,
    after: TensorSpec | None = None,
) -> ExchangePart:
    """Our `first` rows for the place before, our `last` ones for the place after, and what comes back from them.

    None where there is nobody, or nothing is needed.
    """
    ranks = {-1: axis.ranks[axis.rank - 1], 1: axis.ranks[(axis.rank + 1) % axis.size]}
    outgoing = [((ranks[side],), (x,)) for side, x in ((-1, first), (1, last)) if x is not None]
    incoming = {ranks[side]: (spec,) for side, spec in ((-1, before), (1, after)) if spec is not None}
    return ExchangePart("halo", outgoing, incoming)


def halo_of(axis: Axis, edges: ExchangePart, found: Received) -> Halo:
    """The neighbours' rows out of what an `edges_part` brought."""

    def rows(group_rank: int) -> Tensor | None:
        peer = axis.ranks[group_rank] if 0 <= group_rank < axis.size else None
        return found[peer][0] if peer is not None and peer in edges.incoming else None

    return Halo(rows(axis.rank - 1), rows(axis.rank + 1))
