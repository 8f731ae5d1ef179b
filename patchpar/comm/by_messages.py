"""Collectives over transports that have messages only: one message from each rank to each other.

`send_recv` and `exchange` are those of a Communicator.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart, Halo, Received, moments_part, shared_and_halo
from patchpar.comm.transport import FlatParts, Incoming, Messages, Outgoing, TensorSpec, Work
from patchpar.plan.mesh import Axis

SendRecv = Callable[..., Work[Messages]]
Exchange = Callable[..., Work[list[Received]]]


def gather_by_messages(
    send_recv: SendRecv, axis: Axis, kind: str, where: str, own: Tensor, into: Tensor | None
) -> Work[Tensor]:
    """Start to gather `own`, of any shape, of all ranks: the result is [P, *own.shape], or `into` if it is given."""
    out = own.new_empty((axis.size, *own.shape)) if into is None else into.view(axis.size, *own.shape)
    if into is None:
        out[axis.rank] = own
    specs = (TensorSpec.of(own),)
    incoming = [Incoming(axis.ranks[other], specs, (out[other],)) for other in axis.others]
    pending = send_recv(kind, where, [Outgoing(axis.other_ranks, (own,))], incoming)
    return pending.then(lambda _: out if into is None else into)


def all_to_all_by_messages(
    send_recv: SendRecv, axis: Axis, kind: str, where: str, own: FlatParts, into: FlatParts
) -> Work[Tensor]:
    """Start to send each rank its part of `own`; the result is the buffer of `into` [elements] with those received."""
    sent, received = own.parts(), into.parts()
    outgoing = [Outgoing((axis.ranks[other],), (sent[other],)) for other in axis.others]
    incoming = [
        Incoming(axis.ranks[other], (TensorSpec.of(received[other]),), (received[other],)) for other in axis.others
    ]
    received[axis.rank].copy_(sent[axis.rank])
    return send_recv(kind, where, outgoing, incoming, axis).then(lambda _: into.buffer)


def edges_by_messages(
    exchange: Exchange, axis: Axis, where: str, shared: Sequence[Tensor], edges: ExchangePart | None
) -> Work[tuple[Received, Halo]]:
    """Start to send `shared`, tensors of any shape, to all ranks, and edge rows to the neighbours, if there are any.

    The result: the other ranks' `shared` by group rank, and the neighbours' rows [B, C, ..., r, W].
    """
    parts = [moments_part(axis, shared)] if shared else []
    parts += [] if edges is None else [edges]
    return exchange(where, parts).then(partial(shared_and_halo, axis, len(shared), edges))
