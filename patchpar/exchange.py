"""What travels between ranks, as the strategies see it. All of it goes through one `Door`, which counts.

    gather      every place's share, in order            K,V; the prediction
    Round       moments to everyone, edge rows to neighbours, in one message each
    send / receive   one rank to another                 the other guidance branch

Nothing here knows about steps or staleness.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from patchpar.mesh import Axis
from patchpar.transport import Incoming, Outgoing, Pending, Spec, Transport

T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """What one rank has sent and waited for since the last `clear`, by kind of exchange."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    seconds_waited: dict[str, float] = field(default_factory=dict)

    def clear(self) -> None:
        """Start counting again."""
        self.bytes_sent.clear()
        self.rounds.clear()
        self.seconds_waited.clear()

    @property
    def total_bytes(self) -> int:
        """Bytes that left this rank, of every kind."""
        return sum(self.bytes_sent.values())


class Arriving:
    """A `Pending` that books how long it was waited for."""

    def __init__(self, pending: Pending, traffic: Traffic, kind: str) -> None:
        self._pending, self._traffic, self._kind = pending, traffic, kind

    def wait_for(self, index: int) -> list[Tensor]:
        """Tensors of the `index`-th incoming message. Raises ExchangeError after the deadline."""
        return self._booked(lambda: self._pending.wait_for(index))

    def wait(self) -> list[list[Tensor]]:
        """Tensors of all incoming messages. Raises ExchangeError after the deadline."""
        return self._booked(self._pending.wait)

    def _booked(self, wait: Callable[[], T]) -> T:
        start = time.perf_counter()
        received = wait()
        waited = self._traffic.seconds_waited
        waited[self._kind] = waited.get(self._kind, 0.0) + time.perf_counter() - start
        return received


class Door:
    """The one way out of this rank."""

    def __init__(self, transport: Transport, mark: Callable[[str], object] | None = None) -> None:
        self.transport, self.traffic = transport, Traffic()
        self._mark = mark

    def swap(self, kind: str, where: str, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> Arriving:
        """Start one exchange of `kind` at the seam `where`."""
        if self._mark is not None:
            self._mark(where)
        self.traffic.bytes_sent[kind] += sum(message.num_bytes for message in outgoing)
        self.traffic.rounds[kind] += 1
        return Arriving(self.transport.swap(outgoing, incoming, where), self.traffic, kind)

    def send(self, kind: str, where: str, peers: Sequence[int], tensors: Sequence[Tensor]) -> Arriving:
        """Start sending `tensors` to each of `peers` (global ranks). Hold the result until it has been waited for."""
        return self.swap(kind, where, [Outgoing(tuple(peers), tuple(tensors))], [])

    def receive(self, kind: str, where: str, peer: int, specs: Sequence[Spec]) -> Arriving:
        """Expect one message from `peer` (a global rank)."""
        return self.swap(kind, where, [], [Incoming(peer, tuple(specs))])


class Gather:
    """Every place's tensors on one axis; shares may differ in size."""

    def __init__(self, door: Door, axis: Axis, kind: str, where: str) -> None:
        self.door, self.axis, self.kind, self.where = door, axis, kind, where

    def start(self, own: Sequence[Tensor], specs: Callable[[int], Sequence[Spec]]) -> "Gathering":
        """Send `own` to everyone; `specs(place)` tells what comes from each other place."""
        axis = self.axis
        outgoing = [Outgoing(tuple(axis.ranks[place] for place in axis.others), tuple(own))]
        incoming = [Incoming(axis.ranks[place], tuple(specs(place))) for place in axis.others]
        return Gathering(self.door.swap(self.kind, self.where, outgoing, incoming), axis, list(own))

    def same(self, own: Tensor) -> list[Tensor]:
        """Tensors of one shape from every place, in order, now."""
        if self.axis.size == 1:
            return [own]
        spec = Spec.of(own)
        return [tensors[0] for tensors in self.start([own], lambda _: [spec]).wait()]

    def shares(self, own: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors whose size along `dim` differs by place, in order, now."""
        if self.axis.size == 1:
            return [own]
        dim %= own.ndim
        before, after = own.shape[:dim], own.shape[dim + 1 :]

        def specs(place: int) -> list[Spec]:
            return [Spec((*before, sizes[place], *after), own.dtype)]

        return [tensors[0] for tensors in self.start([own], specs).wait()]


class Gathering:
    """A gather under way."""

    def __init__(self, arriving: Arriving, axis: Axis, own: list[Tensor]) -> None:
        self._arriving, self._axis, self._own = arriving, axis, own

    def others(self) -> Iterator[tuple[int, list[Tensor]]]:
        """(place, tensors) of everyone else, the nearest first, each as soon as it is here."""
        for index, place in enumerate(self._axis.others):
            yield place, self._arriving.wait_for(index)

    def wait(self) -> list[list[Tensor]]:
        """Tensors of every place, own included, in order."""
        received = {self._axis.rank: self._own, **dict(self.others())}
        return [received[place] for place in range(self._axis.size)]


class Round:
    """One message to each other place: small values for all, edge rows for the two neighbours as well."""

    def __init__(self, door: Door, axis: Axis, kind: str, where: str) -> None:
        self.door, self.axis, self.kind, self.where = door, axis, kind, where

    def start(
        self, shared: Sequence[Tensor], first: Tensor | None, last: Tensor | None, halo: "HaloSpecs"
    ) -> "Rounding":
        """Send `shared` to everyone, our `first` rows to the place before and our `last` rows to the one after."""
        axis = self.axis
        common = tuple(Spec.of(x) for x in shared)
        outgoing, incoming = [], []
        for place in axis.others:
            rows = {axis.rank - 1: first, axis.rank + 1: last}.get(place)
            come = {axis.rank - 1: halo.before, axis.rank + 1: halo.after}.get(place)
            if shared or rows is not None:
                tensors = (*shared, *([] if rows is None else [rows]))
                outgoing.append(Outgoing((axis.ranks[place],), tensors))
            if shared or come is not None:
                incoming.append(Incoming(axis.ranks[place], (*common, *([] if come is None else [come]))))
        return Rounding(self.door.swap(self.kind, self.where, outgoing, incoming), incoming, axis, len(common))


@dataclass(frozen=True, slots=True)
class HaloSpecs:
    """What comes from the place before and the place after; None where there is none, or nothing is needed."""

    before: Spec | None = None
    after: Spec | None = None


class Rounding:
    """A round under way."""

    def __init__(self, arriving: Arriving, incoming: list[Incoming], axis: Axis, num_shared: int) -> None:
        self._arriving, self._incoming, self._axis, self._num_shared = arriving, incoming, axis, num_shared

    def wait(self) -> tuple[dict[int, list[Tensor]], Tensor | None, Tensor | None]:
        """(shared values by place, rows before ours, rows after ours)."""
        shared, rows = {}, {}
        for message, tensors in zip(self._incoming, self._arriving.wait(), strict=True):
            place = self._axis.ranks.index(message.peer)
            shared[place] = tensors[: self._num_shared]
            rows[place] = next(iter(tensors[self._num_shared :]), None)
        return shared, rows.get(self._axis.rank - 1), rows.get(self._axis.rank + 1)
