"""What ranks exchange at one exchange point: parts of several kinds, of which each rank gets one message.

Where all ranks of an axis take part at once, that is said, so that it can be one operation of the backend.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from patchpar.comm.kernels.pack_tensors import copies_of
from patchpar.comm.transport import Collectives, Incoming, Messages, Outgoing, TensorSpec, Transport, Work
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.comm.transport.packing import LAYOUTS_KEPT, adjacent_rows, gather_buffers
from patchpar.plan.mesh import Axis

Tensors = tuple[Tensor, ...]
Received = Mapping[int, list[Tensor]]  # by sender
NOWHERE: Mapping[int, Tensors] = MappingProxyType({})


class ExchangePart(NamedTuple):
    """Values of one kind in an exchange; peers are global ranks.

    `outgoing`: (receivers, tensors). `incoming`: specs by sender. `into`: buffers for a sender's values. `axis`: every
    rank of it takes part in this exchange now, also one that has nothing to send; None if that is not so. `to_all`:
    every rank of the axis sends the same tensors to all others. `at_once`: nobody reads `into` from now until the
    wait, so that it may be written before. `whole`: then, the contiguous buffer that `into` of all senders fill, one
    after the other in the order of ranks.
    """

    kind: str
    outgoing: Sequence[tuple[tuple[int, ...], Tensors]]
    incoming: Mapping[int, tuple[TensorSpec, ...]]
    into: Mapping[int, Tensors] = NOWHERE
    axis: Axis | None = None
    to_all: bool = False
    at_once: bool = False
    whole: Tensor | None = None

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
        return self.with_copies(copies_of([x for _, tensors in self.outgoing for x in tensors]))

    def with_copies(self, copies: Sequence[Tensor]) -> "ExchangePart":
        """Return the same part with `copies` of its tensors, each of the same shape, in their order."""
        remaining = iter(copies)
        outgoing = [(peers, tuple(next(remaining) for _ in tensors)) for peers, tensors in self.outgoing]
        return self._replace(outgoing=outgoing)


class ExchangeScope(NamedTuple):
    """Who takes part in an exchange. `axis` and `to_all` as of `ExchangePart`. `bulk`: not needed in this step.

    `memory`: has the buffers of an exchange that is repeated in every step, where the transport has collectives.
    """

    axis: Axis | None = None
    to_all: bool = False
    bulk: bool = False
    memory: MessageMemory | None = None

    @classmethod
    def of(cls, parts: Sequence[ExchangePart], *, bulk: bool, memory: MessageMemory | None = None) -> "ExchangeScope":
        """Return the scope of an exchange of all parts together."""
        filled = [part for part in parts if part.axis is not None or part.outgoing or part.incoming]
        axes = {part.axis for part in filled}
        axis = axes.pop() if len(axes) == 1 else None
        return cls(axis, axis is not None and all(part.to_all for part in filled), bulk, memory)


def start_messages(
    transport: Transport,
    where: str,
    outgoing: Sequence[Outgoing],
    incoming: Sequence[Incoming],
    scope: ExchangeScope,
) -> Work[Messages]:
    """Start an exchange: by one operation of all ranks of the axis where the transport has it."""
    axis = scope.axis
    collectives = None if axis is None else collectives_of(transport, axis.ranks)
    if collectives is None or axis is None:
        return transport.send_recv(outgoing, incoming, where)
    if not scope.to_all:
        return collectives.exchange(axis.ranks, outgoing, incoming, where, bulk=scope.bulk, memory=scope.memory)
    (own,) = outgoing
    buffers = _rows_of_one_buffer(axis, own.tensors, incoming) or gather_buffers(
        own.tensors, [each.specs for each in incoming], scope.memory
    )
    if buffers is None and (scope.bulk or scope.memory is not None):
        return collectives.exchange(axis.ranks, outgoing, incoming, where, bulk=scope.bulk, memory=scope.memory)
    if buffers is None:
        return transport.send_recv(outgoing, incoming, where)
    return collectives.gather_messages(axis.ranks, *buffers, incoming, where, bulk=scope.bulk)


def _rows_of_one_buffer(axis: Axis, own: Tensors, incoming: Sequence[Incoming]) -> tuple[Tensor, Tensor] | None:
    """Return the tensor sent and all ranks' in order, if they are rows of one buffer that may be written now."""
    into = {message.peer: message.into or () for message in incoming if message.at_once}
    if len(own) != 1 or len(into) != len(incoming):
        return None
    by_rank = [into.get(rank, own) for rank in axis.ranks]
    parts = [found[0] for found in by_rank if len(found) == 1 and found[0] is not None]
    rows = adjacent_rows(parts) if len(parts) == axis.size else None
    return None if rows is None else (own[0].detach().view(-1), rows)


def collectives_of(transport: Transport, ranks: tuple[int, ...]) -> Collectives | None:
    """Return the operations of all of several `ranks` at once, if there are any."""
    if len(ranks) == 1 or transport.collectives is None:
        return None
    return transport.collectives if transport.collectives.covers(ranks) else None


class KnownCollectives(dict[tuple[int, ...], Collectives | None]):
    """The operations of sets of ranks, found once: what is known costs no call of Python. None while there are none."""

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._transport = transport

    def __missing__(self, ranks: tuple[int, ...]) -> Collectives | None:
        found = collectives_of(self._transport, ranks)
        if found is not None:
            self[ranks] = found
        return found


def outgoing_of(parts: Sequence[ExchangePart]) -> list[Outgoing]:
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


def incoming_of(parts: Sequence[ExchangePart]) -> list[Incoming]:
    """Return one message expected from each peer."""
    specs: dict[int, list[TensorSpec]] = {}
    into: dict[int, list[Tensor | None]] = {}
    for part in parts:
        for peer, expected in part.incoming.items():
            specs.setdefault(peer, []).extend(expected)
            into.setdefault(peer, []).extend(part.into.get(peer, [None] * len(expected)))
    at_once = all(part.at_once for part in parts)
    return [Incoming(peer, tuple(expected), tuple(into[peer]), at_once) for peer, expected in specs.items()]


def by_part(parts: Sequence[ExchangePart], incoming: Sequence[Incoming], received: Messages) -> list[Received]:
    """Return for each part the tensors by sender."""
    whole = {message.peer: iter(tensors) for message, tensors in zip(incoming, received, strict=True)}
    return [{peer: [next(whole[peer]) for _ in specs] for peer, specs in part.incoming.items()} for part in parts]


def moments_part(axis: Axis, shared: Sequence[Tensor]) -> ExchangePart:
    """Return the exchange of small tensors with all ranks, each of any shape that is the same shape on all."""
    incoming = _same_of_all(axis, tuple([(x.shape, x.dtype) for x in shared]))
    return ExchangePart("moments", [(tuple(incoming), tuple(shared))], incoming, axis=axis, to_all=True)


@lru_cache(maxsize=LAYOUTS_KEPT)  # every norm with stale moments asks, in every call
def _same_of_all(
    axis: Axis, facts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
) -> Mapping[int, tuple[TensorSpec, ...]]:
    """Return what the others send, by their ranks, the nearest first: tensors of these shapes and dtypes from each."""
    specs = tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in facts)
    return MappingProxyType(dict.fromkeys(axis.other_ranks, specs))


class Halo(NamedTuple):
    """The neighbours' rows [B, C, ..., r, W], or columns [B, C, ..., H, r], next to ours; None at an image's edge."""

    before: Tensor | None
    after: Tensor | None


MomentRows = tuple[Tensor, tuple[int, ...]]
"""Packed moments of all ranks where they were received: values [elements], and where each rank's begin. Without these
starts the values are [P, N]. A tuple, which costs no call of Python in every norm."""


def moment_rows(axis: Axis, own: Tensor, received: Received) -> MomentRows:
    """Return `own` [N] and those received of the others by group rank."""
    found = [own if rank == axis.rank else received[rank][0] for rank in range(axis.size)]
    return torch.cat(found).view(axis.size, -1), ()


def stacked_moments(rows: MomentRows, size: int) -> Tensor:
    """Return moments of all ranks as [P, N], of `size` N."""
    values, starts = rows
    return torch.stack([values.narrow(0, start, size) for start in starts]) if starts else values


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
    outgoing: list[tuple[tuple[int, ...], Tensors]] = []
    if first is not None:
        outgoing.append(((axis.ranks[axis.rank - 1],), (first,)))
    if last is not None:
        outgoing.append(((axis.ranks[(axis.rank + 1) % axis.size],), (last,)))
    incoming = _expected_edges(axis, before, after)
    # If a layer reads beyond its band, every rank has something to send or to receive: if this rank has not, none has.
    return ExchangePart("halo", outgoing, incoming, axis=axis if outgoing or incoming else None)


@lru_cache(maxsize=LAYOUTS_KEPT)  # every norm and convolution asks, in every call
def _expected_edges(
    axis: Axis, before: TensorSpec | None, after: TensorSpec | None
) -> Mapping[int, tuple[TensorSpec, ...]]:
    """Return what the neighbours send, by their ranks."""
    sides = ((axis.ranks[axis.rank - 1], before), (axis.ranks[(axis.rank + 1) % axis.size], after))
    return MappingProxyType({rank: (spec,) for rank, spec in sides if spec is not None})


def halo_of(axis: Axis, edges: ExchangePart, found: Received) -> Halo:
    """Return the neighbours' rows out of what was received for an `edges_part`."""

    def rows(group_rank: int) -> Tensor | None:
        peer = axis.ranks[group_rank] if 0 <= group_rank < axis.size else None
        return found[peer][0] if peer is not None and peer in edges.incoming else None

    return Halo(rows(axis.rank - 1), rows(axis.rank + 1))


def shared_and_halo(
    axis: Axis, num_shared: int, edges: ExchangePart | None, found: Sequence[Received]
) -> tuple[Received, Halo]:
    """Return what was received for a `moments_part` of so many tensors, by group rank, and for an `edges_part`."""
    by_rank = {axis.ranks.index(peer): tensors for peer, tensors in found[0].items()} if num_shared else {}
    return by_rank, Halo(None, None) if edges is None else halo_of(axis, edges, found[-1])
