"""What ranks exchange at one exchange point: parts of several kinds, of which each rank gets one message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.transport import Incoming, Messages, Outgoing, TensorSpec
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
    return [Incoming(peer, tuple(expected), tuple(into[peer])) for peer, expected in specs.items()]


def by_part(parts: Sequence[ExchangePart], incoming: Sequence[Incoming], received: Messages) -> list[Received]:
    """Return for each part the tensors by sender."""
    whole = {message.peer: iter(tensors) for message, tensors in zip(incoming, received, strict=True)}
    return [{peer: [next(whole[peer]) for _ in specs] for peer, specs in part.incoming.items()} for part in parts]


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
