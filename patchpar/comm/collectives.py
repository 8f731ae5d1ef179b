"""Collectives between ranks, for the strategies. All of them use one `Communicator`, which counts the traffic.

    AllGather           every rank's part, in order             K, V; the prediction
    gather_moments      moments to all ranks, edge rows to the neighbours, in one message each
    gather_with_edges   the same of any tensors, or edge rows alone
    send / receive      one rank to another                     the other guidance branch
    exchange            any of these together, one message to each rank

Each starts at once and returns a `Work`; its `wait()` blocks. Steps and stale values are no concern of this module.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from patchpar.comm.by_messages import all_to_all_by_messages, edges_by_messages, gather_by_messages
from patchpar.comm.exchange_layout import exchange_layout
from patchpar.comm.exchange_part import (
    ExchangePart,
    ExchangeScope,
    Halo,
    KnownCollectives,
    MomentRows,
    Received,
    by_part,
    incoming_of,
    moment_rows,
    outgoing_of,
    start_messages,
)
from patchpar.comm.known_exchange import Known
from patchpar.comm.layouts import AllToAllLayout, EdgeLayout, all_to_all_layout, edge_layout, gather_layout
from patchpar.comm.traffic import Booked, CommStats
from patchpar.comm.transport import (
    Arrived,
    FlatParts,
    Incoming,
    Messages,
    Outgoing,
    TensorSpec,
    Transport,
    Work,
    transport_of_host,
)
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.launch.message_seal import MessageSeal
from patchpar.plan.mesh import Axis

T = TypeVar("T")
Beat = Callable[[str], object]


class Communicator:
    """Sends, receives and counts this rank's messages. `seal`: see RankContext. `host`: for what stays on the host."""

    def __init__(self, transport: Transport, beat: Beat | None = None, seal: MessageSeal | None = None) -> None:
        self.transport, self.seal, self.traffic, self._beat = transport, seal, CommStats(), beat
        self._collectives, host = KnownCollectives(transport), transport_of_host(transport)
        self.host: Communicator = self if host is transport else Communicator(host, beat, seal)

    def send_recv(
        self,
        kind: str,
        where: str,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        axis: Axis | None = None,
    ) -> Work[Messages]:
        """Start one exchange of `kind` at the exchange point `where`. The Work raises ExchangeError.

        `axis`: every rank of it does so now, also one without messages, with at most one message of each to each.
        """
        return self.start(kind, where, outgoing, incoming, ExchangeScope(axis))

    def start(
        self, kind: str, where: str, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], scope: ExchangeScope
    ) -> Work[Messages]:
        """Start one exchange of `kind` at the exchange point `where`. The Work raises ExchangeError."""
        sent, received = (sum(message.num_bytes for message in messages) for messages in (outgoing, incoming))
        begin = partial(start_messages, self.transport, where, outgoing, incoming, scope)
        return self._start(kind, where, begin, ((kind, sent, received),))

    def all_gather(
        self, axis: Axis, kind: str, where: str, own: Tensor, *, bulk: bool = False, into: Tensor | None = None
    ) -> Work[Tensor]:
        """Start to gather `own`, of any shape, but the same shape and dtype on all ranks of the axis.

        One operation where the transport has it. `bulk`: what is not needed in this step, so that it does not hold up
        what is. `into`: a contiguous buffer for the result in which `own` is in its place already; None allocates one.
        The result of the Work: [P, *own.shape] in the order of group ranks, this rank's included. It raises
        ExchangeError.
        """
        if axis.size == 1:
            return Arrived(own.unsqueeze(0), where)
        if own.requires_grad or not own.is_contiguous():
            own = own.detach().contiguous()
        collectives = self._collectives[axis.ranks]
        if collectives is None:
            return gather_by_messages(self.send_recv, axis, kind, where, own, into)
        layout = gather_layout(axis, own.shape, own.dtype)
        rows = own.new_empty(layout.joined) if into is None else into
        begin = partial(collectives.all_gather, axis.ranks, own, rows, layout.incoming, where, bulk=bulk)
        pending = self._start(kind, where, begin, ((kind, layout.num_bytes, layout.num_bytes),))
        return pending if into is not None else pending.then(layout.as_stacked)

    def repeat(self, known: Known) -> Work[Any]:
        """Start an exchange of bulk whose tensors are known. The Work raises ExchangeError."""
        begin = partial(known.begin, self.transport, self._collectives[known.ranks])
        return self._start(known.booked[0], known.where, begin, (known.booked,))

    def all_to_all(
        self, axis: Axis, kind: str, where: str, own: FlatParts, into: FlatParts, layout: AllToAllLayout | None = None
    ) -> Work[Tensor]:
        """Start to send each rank of the axis its part of `own`, and to receive its part of `into` from each.

        One operation where the transport has it. `layout`: of these parts, if it is known. The result of the Work: the
        buffer of `into` [elements] with its own part. It raises ExchangeError.
        """
        collectives = self._collectives[axis.ranks]
        if collectives is None:
            return all_to_all_by_messages(self.send_recv, axis, kind, where, own, into)
        if layout is None:
            layout = all_to_all_layout(axis, tuple(own.sizes), tuple(into.sizes), own.buffer.dtype)
        begin = partial(collectives.all_to_all, axis.ranks, own, into, layout.incoming, where)
        return self._start(kind, where, begin, ((kind, layout.sent, layout.received),))

    def exchange(
        self,
        where: str,
        parts: Sequence[ExchangePart],
        label: str = "",
        *,
        bulk: bool = False,
        memory: MessageMemory | None = None,
    ) -> Work[list[Received]]:
        """Start an exchange of several kinds: one message to each rank, whatever the number of parts.

        `bulk`: what is not needed in this step. `memory`: has its buffers, if it is repeated in every step. The result
        of the Work: for each part the received tensors by sender. It raises ExchangeError.
        """
        scope = ExchangeScope.of(parts, bulk=bulk, memory=memory)
        label = label or "+".join([part.kind for part in parts])
        collectives = None if scope.axis is None or scope.to_all else self._collectives[scope.axis.ranks]
        if scope.axis is not None and collectives is not None:
            layout, tensors = exchange_layout(scope.axis, parts)
            start = partial(layout.start, collectives, self.transport.device, where, parts, tensors, scope)
            return self._start(label, where, start, layout.booked)
        outgoing, incoming = outgoing_of(parts), incoming_of(parts)
        booked = [(part.kind, part.bytes_sent, part.bytes_received) for part in parts]
        begin = partial(start_messages, self.transport, where, outgoing, incoming, scope)
        return self._start(label, where, begin, booked).then(partial(by_part, tuple(parts), incoming))

    def gather_with_edges(
        self, axis: Axis, where: str, shared: Sequence[Tensor], edges: ExchangePart | None
    ) -> Work[tuple[Received, "Halo"]]:
        """Send `shared`, tensors of the same shape on all ranks, to all of the axis and `edges` to the two neighbours.

        One message to each. `edges` comes from `edges_part`. The result of the Work: the other ranks' `shared` by group
        rank, and the neighbours' rows [B, C, ..., r, W]. It raises ExchangeError.
        """
        collectives = self._collectives[axis.ranks]
        if collectives is None or edges is None or edges.axis is None:
            return edges_by_messages(self.exchange, axis, where, shared, edges)
        layout, tensors = edge_layout(axis, shared, edges)
        sent, received = layout.buffers(tensors, self.transport.device)
        begin = partial(collectives.all_to_all, axis.ranks, sent, received, layout.incoming, where)
        return self._start(layout.label, where, begin, layout.booked).then(layout.unpack)

    def gather_moments(self, axis: Axis, where: str, own: Tensor, edges: ExchangePart) -> Work[tuple[MomentRows, Halo]]:
        """Send `own` [N] to all of the axis and `edges` to the two neighbours, one message to each.

        `edges` comes from `edges_part`. The result of the Work: `own` of all ranks, this one's too, in the buffer that
        was received, and the neighbours' rows [B, C, ..., r, W]. It raises ExchangeError.
        """
        if self._collectives[axis.ranks] is None or edges.axis is None:
            pending = edges_by_messages(self.exchange, axis, where, (own,), edges)
            return pending.then(lambda found: (moment_rows(axis, own, found[0]), found[1]))
        return self.repeat_moments(where, *edge_layout(axis, (own,), edges))

    def moments_layout(self, axis: Axis, own: Tensor, edges: ExchangePart) -> EdgeLayout | None:
        """Return the layout of `gather_moments` for tensors like these; None where it is not one operation."""
        if self._collectives[axis.ranks] is None or edges.axis is None:
            return None
        return edge_layout(axis, (own,), edges)[0]

    def repeat_moments(
        self, where: str, layout: EdgeLayout, tensors: Sequence[Tensor], *, fused: bool | None = None
    ) -> Work[tuple[MomentRows, Halo]]:
        """As `gather_moments`, where its layout is known. `tensors`: own moments [N], then the edge rows that are sent.

        `fused`: whether they go through kernels, if that is known.
        """
        collectives = self._collectives[layout.ranks]
        assert collectives is not None, "a layout is of one operation"
        sent, received = layout.buffers(tensors, self.transport.device, fused=fused)
        begin = partial(collectives.all_to_all, layout.ranks, sent, received, layout.incoming, where)
        return self._start(layout.label, where, begin, layout.booked).then(layout.unpack_moments)

    def _start(self, kind: str, where: str, begin: Callable[[], Work[T]], booked: Sequence[Booked]) -> Work[T]:
        """Start what `begin` starts, at the exchange point `where`."""
        if self._beat is not None:
            self._beat(where)
        traffic = self.traffic
        traffic.book(booked)
        traffic.rounds[kind] += 1
        start = 0.0 if traffic.events is None else time.perf_counter()
        pending = begin()
        if traffic.events is not None:
            traffic.note("send", kind, where, start)
        pending.on_wait = partial(traffic.waited, kind, where)
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


AxisComm = tuple[Communicator, Axis]
"""A communicator, and the mesh axis whose ranks it is used with."""


class AllGather:
    """The tensors of every rank of one axis; parts may differ in size."""

    def __init__(self, comm: Communicator, axis: Axis, kind: str, where: str) -> None:
        self.comm, self.axis, self.kind, self.where = comm, axis, kind, where

    def start(
        self, own: Sequence[Tensor], specs: Callable[[int], Sequence[TensorSpec]], *, bulk: bool = False
    ) -> Work[Messages]:
        """Start sending `own`, tensors of any shape, to all; `specs(group_rank)` returns what each other rank sends.

        One operation where the transport has it. `bulk`: what is not needed in this step.
        The result of the Work: the tensors of every rank in the order of group ranks, `own` included. `arriving` yields
        those of `axis.others`, the nearest first, each as soon as it has arrived. Both raise ExchangeError.
        """
        axis, own_tensors = self.axis, list(own)
        incoming = [Incoming(axis.ranks[group_rank], tuple(specs(group_rank))) for group_rank in axis.others]

        def in_order(received: Messages) -> Messages:
            of_others = dict(zip(axis.others, received, strict=True))
            return [of_others.get(group_rank, own_tensors) for group_rank in range(axis.size)]

        scope = ExchangeScope(axis, to_all=True, bulk=bulk)
        return self.comm.start(self.kind, self.where, [Outgoing(axis.other_ranks, tuple(own))], incoming, scope).then(
            in_order
        )

    def same(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in order, all of the same shape as `own`. Blocks. Raises ExchangeError."""
        if self.axis.size == 1:
            return [own]
        spec = TensorSpec.of(own)
        return [tensors[0] for tensors in self.start([own], lambda _: [spec]).wait()]

    def of_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes of all ranks in order, of any lengths. Blocks. Raises ExchangeError, AuthenticationError."""
        seal, ranks = self.comm.seal, self.axis.ranks
        if seal is None:
            return self._of_bytes(own)
        return seal.gathered(f"{self.kind} {self.where} {ranks}", own, self._of_bytes, ranks)

    def _of_bytes(self, own: bytes) -> list[bytes]:
        device = self.comm.transport.device
        sizes = [int(size) for size in self.same(torch.tensor([len(own)], device=device))]
        if not any(sizes):
            return [b""] * len(sizes)
        packed = torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8)[: len(own)].to(device)
        return [part.cpu().numpy().tobytes() for part in self.parts(packed, 0, sizes)]

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
