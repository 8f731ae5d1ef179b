"""What travels between ranks, as the strategies see it. All of it goes through one `Communicator`, which counts.

    gather      every place's share, in order            K,V; the prediction
    Round       moments to everyone, edge rows to neighbours, in one message each
    send / receive   one rank to another                 the other guidance branch
    exchange    any of these together, one message to each rank

Nothing here knows about steps or staleness.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor

from patchpar.comm.traffic import CommStats
from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, Transport, Work
from patchpar.plan.mesh import Axis

T = TypeVar("T")
Tensors = tuple[Tensor, ...]


class TimedWork:
    """A `Work` that books how long it was waited for."""

    def __init__(self, pending: Work, traffic: CommStats, kind: str, where: str) -> None:
        self._pending, self._traffic, self._kind, self._where = pending, traffic, kind, where

    def is_here(self, index: int) -> bool:
        """Whether the `index`-th incoming message is known to be here."""
        return self._pending.is_here(index)

    def wait_for(self, index: int) -> list[Tensor]:
        """Tensors of the `index`-th incoming message. Raises ExchangeError after the deadline."""
        return self._booked(lambda: self._pending.wait_for(index))

    def wait(self) -> list[list[Tensor]]:
        """Tensors of all incoming messages. Raises ExchangeError after the deadline."""
        return self._booked(self._pending.wait)

    def _booked(self, wait: Callable[[], T]) -> T:
        start = time.perf_counter()
        received = wait()
        self._traffic.book_wait(self._kind, time.perf_counter() - start)
        self._traffic.stalls += ((self._kind, stall) for stall in self._pending.stalls())
        self._traffic.note("wait", self._kind, self._where, start)
        return received


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


class Communicator:
    """The one way out of this rank."""

    def __init__(self, transport: Transport, mark: Callable[[str], object] | None = None) -> None:
        self.transport, self.traffic = transport, CommStats()
        self._mark = mark

    def swap(self, kind: str, where: str, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> TimedWork:
        """Start one exchange of `kind` at the seam `where`."""
        self.traffic.bytes_sent[kind] += sum(message.num_bytes for message in outgoing)
        self.traffic.bytes_received[kind] += sum(message.num_bytes for message in incoming)
        return self._start(kind, where, outgoing, incoming)

    def exchange(self, where: str, parts: Sequence[ExchangePart], label: str = "") -> "ExchangeWork":
        """Start an exchange of several kinds: one message to each rank, whatever the number of parts."""
        outgoing, incoming = _outgoing(parts), _incoming(parts)
        for part in parts:
            self.traffic.bytes_sent[part.kind] += part.bytes_sent
            self.traffic.bytes_received[part.kind] += part.bytes_received
        label = label or "+".join(part.kind for part in parts)
        return ExchangeWork(self._start(label, where, outgoing, incoming), tuple(parts), incoming)

    def _start(self, kind: str, where: str, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> TimedWork:
        self.mark(where)
        self.traffic.rounds[kind] += 1
        start = time.perf_counter()
        pending = self.transport.swap(outgoing, incoming, where)
        self.traffic.note("send", kind, where, start)
        return TimedWork(pending, self.traffic, kind, where)

    def mark(self, where: str) -> None:
        """Show that this rank has come to `where`, without an exchange."""
        if self._mark is not None:
            self._mark(where)

    def send(self, kind: str, where: str, peers: Sequence[int], tensors: Sequence[Tensor]) -> TimedWork:
        """Start sending `tensors` to each of `peers` (global ranks). Hold the result until it has been waited for."""
        return self.swap(kind, where, [Outgoing(tuple(peers), tuple(tensors))], [])

    def receive(self, kind: str, where: str, peer: int, specs: Sequence[TensorSpec]) -> TimedWork:
        """Expect one message from `peer` (a global rank)."""
        return self.swap(kind, where, [], [Incoming(peer, tuple(specs))])


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


class ExchangeWork:
    """An exchange of several parts under way."""

    def __init__(self, arriving: TimedWork, parts: tuple[ExchangePart, ...], incoming: list[Incoming]) -> None:
        self._arriving, self._parts, self._incoming = arriving, parts, incoming
        self._received: list[dict[int, list[Tensor]]] | None = None

    def wait(self) -> list[dict[int, list[Tensor]]]:
        """Tensors of each part, by sender. Raises ExchangeError after the deadline. Idempotent."""
        if self._received is None:
            whole = {m.peer: iter(tensors) for m, tensors in zip(self._incoming, self._arriving.wait(), strict=True)}
            self._received = [
                {peer: [next(whole[peer]) for _ in specs] for peer, specs in part.incoming.items()}
                for part in self._parts
            ]
        return self._received


class AllGather:
    """Every place's tensors on one axis; shares may differ in size."""

    def __init__(self, door: Communicator, axis: Axis, kind: str, where: str) -> None:
        self.door, self.axis, self.kind, self.where = door, axis, kind, where

    def start(self, own: Sequence[Tensor], specs: Callable[[int], Sequence[TensorSpec]]) -> "AllGatherWork":
        """Send `own` to everyone; `specs(place)` tells what comes from each other place."""
        axis = self.axis
        outgoing = [Outgoing(tuple(axis.ranks[place] for place in axis.others), tuple(own))]
        incoming = [Incoming(axis.ranks[place], tuple(specs(place))) for place in axis.others]
        return AllGatherWork(self.door.swap(self.kind, self.where, outgoing, incoming), axis, list(own))

    def same(self, own: Tensor) -> list[Tensor]:
        """Tensors of one shape from every place, in order, now."""
        if self.axis.size == 1:
            return [own]
        spec = TensorSpec.of(own)
        return [tensors[0] for tensors in self.start([own], lambda _: [spec]).wait()]

    def shares(self, own: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors whose size along `dim` differs by place, in order, now."""
        if self.axis.size == 1:
            return [own]
        dim %= own.ndim
        before, after = own.shape[:dim], own.shape[dim + 1 :]

        def specs(place: int) -> list[TensorSpec]:
            return [TensorSpec((*before, sizes[place], *after), own.dtype)]

        return [tensors[0] for tensors in self.start([own], specs).wait()]


class AllGatherWork:
    """A gather under way."""

    def __init__(self, arriving: TimedWork, axis: Axis, own: list[Tensor]) -> None:
        self._arriving, self._axis, self._own = arriving, axis, own

    def others(self) -> Iterator[tuple[int, list[Tensor]]]:
        """(place, tensors) of everyone else, the nearest first, each as soon as it is here."""
        for index, place in enumerate(self._axis.others):
            yield place, self._arriving.wait_for(index)

    def wait(self) -> list[list[Tensor]]:
        """Tensors of every place, own included, in order."""
        received = {self._axis.rank: self._own, **dict(self.others())}
        return [received[place] for place in range(self._axis.size)]


class GatherWithEdges:
    """One message to each other place: small values for all, edge rows for the two neighbours as well."""

    def __init__(self, door: Communicator, axis: Axis, where: str) -> None:
        self.door, self.axis, self.where = door, axis, where

    def start(self, shared: Sequence[Tensor], edges: "Edges | None") -> "GatherWithEdgesWork":
        """Send `shared` to everyone, and our edge rows to the neighbours."""
        parts = []
        if shared:
            parts.append(moments_part(self.axis, shared))
        if edges is not None:
            parts.append(edges.part(self.axis))
        return GatherWithEdgesWork(self.door.exchange(self.where, parts), self.axis, bool(shared), edges)


def moments_part(axis: Axis, shared: Sequence[Tensor]) -> ExchangePart:
    """Small values of one shape, to and from everyone."""
    peers = tuple(axis.ranks[place] for place in axis.others)
    specs = tuple(TensorSpec.of(x) for x in shared)
    return ExchangePart("moments", [(peers, tuple(shared))], dict.fromkeys(peers, specs))


class Halo(NamedTuple):
    """Rows of the neighbours next to ours; None at an edge of the picture."""

    before: Tensor | None
    after: Tensor | None


@dataclass(frozen=True, slots=True)
class Edges:
    """Our `first` rows for the place before, our `last` ones for the place after, and what comes back from them.

    None where there is nobody, or nothing is needed.
    """

    first: Tensor | None = None
    last: Tensor | None = None
    before: TensorSpec | None = None
    after: TensorSpec | None = None

    def part(self, axis: Axis) -> ExchangePart:
        """As part of an exchange."""
        ranks = {-1: axis.ranks[axis.rank - 1], 1: axis.ranks[(axis.rank + 1) % axis.size]}
        outgoing = [((ranks[side],), (x,)) for side, x in ((-1, self.first), (1, self.last)) if x is not None]
        incoming = {ranks[side]: (s,) for side, s in ((-1, self.before), (1, self.after)) if s is not None}
        return ExchangePart("halo", outgoing, incoming)

    def kept(self) -> "Edges":
        """The same with rows of their own, to be sent later, whatever becomes of the map they are of."""
        first, last = (None if x is None else x.clone() for x in (self.first, self.last))
        return Edges(first, last, self.before, self.after)

    def received(self, axis: Axis, found: Mapping[int, Sequence[Tensor]]) -> tuple[Tensor | None, Tensor | None]:
        """(rows before ours, rows after ours) out of what a part brought."""
        before = found[axis.ranks[axis.rank - 1]][0] if self.before is not None else None
        after = found[axis.ranks[axis.rank + 1]][0] if self.after is not None else None
        return before, after


class GatherWithEdgesWork:
    """A round under way."""

    def __init__(self, exchange: ExchangeWork, axis: Axis, shared: bool, edges: "Edges | None") -> None:
        self._exchange, self._axis, self._shared, self._edges = exchange, axis, shared, edges

    def wait(self) -> tuple[dict[int, list[Tensor]], Tensor | None, Tensor | None]:
        """(shared values by place, rows before ours, rows after ours)."""
        found = list(self._exchange.wait())
        shared = found.pop(0) if self._shared else {}
        before, after = self._edges.received(self._axis, found[0]) if self._edges is not None else (None, None)
        return {self._axis.ranks.index(peer): tensors for peer, tensors in shared.items()}, before, after
