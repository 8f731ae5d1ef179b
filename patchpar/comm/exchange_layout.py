"""An exchange of several kinds that is one operation of all ranks: what is the same in every step is computed once.

Each rank gets one message with the tensors of all parts, in their order, packed as `transport.packing` packs rows of
messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart, ExchangeScope, Received
from patchpar.comm.kernels.pack_tensors import pack_tensors
from patchpar.comm.layouts import TensorView
from patchpar.comm.transport import Collectives, FlatParts, Incoming, TensorSpec, Work
from patchpar.comm.transport.message_memory import MessageMemory, buffer_for
from patchpar.comm.transport.packing import LAYOUTS_KEPT, MessageRow, row_of
from patchpar.plan.mesh import Axis

Flat = tuple[object, ...]
PartForm = tuple[str, tuple[tuple[tuple[int, ...], Flat], ...], tuple[tuple[int, tuple[TensorSpec, ...]], ...]]
"""Kind of a part; receivers of tensors, with shape and dtype of each in turns; specs by sender."""


class ExchangeLayout:
    """The messages of parts of these forms. `booked`: kind, bytes sent and bytes received of each part.

    `incoming`: what comes of the others.
    """

    def __init__(self, axis: Axis, forms: Sequence[PartForm]) -> None:
        self.ranks = axis.ranks
        specs, numbers = list[TensorSpec](), dict[int, list[int]]()
        booked, pending = list[tuple[str, int, int]](), dict[int, list[TensorSpec]]()
        self._numbers = list[list[tuple[int, range]]]()  # of each part, what comes of each sender among all of its
        for kind, sent, received in forms:
            num_sent = 0
            for peers, facts in sent:
                found = list(_specs(facts))
                num_sent += len(peers) * sum(spec.num_bytes for spec in found)
                for peer in peers:
                    numbers.setdefault(peer, []).extend(range(len(specs), len(specs) + len(found)))
                specs += found
            self._numbers.append([])
            for peer, expected in received:
                before = pending.setdefault(peer, [])
                self._numbers[-1].append((peer, range(len(before), len(before) + len(expected))))
                before.extend(expected)
            booked.append((kind, num_sent, sum(spec.num_bytes for _, found in received for spec in found)))
        self.booked, self._num_tensors = tuple(booked), len(specs)
        self.incoming = tuple(Incoming(peer, tuple(found)) for peer, found in pending.items())
        self._plan_sending(specs, [numbers.get(rank, []) for rank in axis.ranks])
        self._plan_receiving(row_of(tuple(tuple(pending.get(rank, ())) for rank in axis.ranks)))

    def _plan_sending(self, specs: Sequence[TensorSpec], numbers: Sequence[Sequence[int]]) -> None:
        row = row_of(tuple(tuple(specs[number] for number in found) for found in numbers))
        dtypes = {spec.dtype for spec in specs}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._size_sent, self._sizes_sent = row.size // self._dtype.itemsize, row.sizes
        pieces = list[int]()
        for found, layout, start in zip(numbers, row.layouts, row.starts, strict=True):
            for number, offset in zip(found, layout.offsets, strict=True):
                pieces += (number, (start + offset * layout.dtype.itemsize) // self._dtype.itemsize)
        self._pieces = tuple(pieces)

    def _plan_receiving(self, row: MessageRow) -> None:
        self._size_received, self._sizes_received = row.size, row.sizes
        self._views: dict[int, list[TensorView]] = {}
        for rank, layout, start in zip(self.ranks, row.layouts, row.starts, strict=True):
            starts = [start + offset * layout.dtype.itemsize for offset in layout.offsets]
            self._views[rank] = [TensorView.at(*each) for each in zip(layout.specs, starts, strict=True)]

    def start(
        self,
        collectives: Collectives,
        device: torch.device,
        where: str,
        parts: Sequence[ExchangePart],
        tensors: Sequence[Tensor],
        scope: ExchangeScope,
    ) -> Work[list[Received]]:
        """Start the exchange of parts with these `tensors`, of any shape. The result of the Work: see `by_part`."""
        filled, into = self._filled(parts), [part.into for part in parts]
        sent, received = self._packed(tensors, device, scope.memory), self._to_receive(filled, device, scope.memory)
        work = collectives.all_to_all(self.ranks, sent, received, self.incoming, where, bulk=scope.bulk)
        return work.then(partial(self.by_part, into) if filled is None else partial(as_received, into[0]))

    def _packed(self, tensors: Sequence[Tensor], device: torch.device, memory: MessageMemory | None) -> FlatParts:
        """Return the bytes sent to each rank. `tensors`: those of all parts in order, of any shape."""
        buffer = buffer_for(memory, "sent", self._size_sent, self._dtype, device)
        if tensors:
            pack_tensors(buffer, tensors, self._pieces)
        if memory is not None:
            pieces, itemsize = iter(self._pieces), self._dtype.itemsize
            starts = zip(pieces, pieces, strict=True)
            memory.hold_sent(buffer, {id(tensors[number]): start * itemsize for number, start in starts})
        return FlatParts(buffer.view(torch.uint8), self._sizes_sent)

    def _filled(self, parts: Sequence[ExchangePart]) -> Tensor | None:
        """Return the buffer, of any shape, that the messages of a single part fill as they come; None without one."""
        whole = parts[0].whole if len(parts) == 1 else None
        if whole is None or whole.nbytes != self._size_received:  # bytes that align a message lie between
            return None
        return whole

    def _to_receive(self, filled: Tensor | None, device: torch.device, memory: MessageMemory | None) -> FlatParts:
        """Return the buffer [bytes] that all messages are received into, which is that of `filled` if there is one."""
        if filled is not None:
            return FlatParts(filled.view(-1).view(torch.uint8), self._sizes_received)
        received = buffer_for(memory, "received", self._size_received, torch.uint8, device)
        return FlatParts(received, self._sizes_received)

    def by_part(self, into: Sequence[Mapping[int, Sequence[Tensor]]], received: Tensor) -> list[Received]:
        """Return for each part the tensors by sender: views of `received` [bytes].

        Or those of `into`, by sender: of the same shapes, they get the values.
        """
        typed: dict[torch.dtype, Tensor] = {torch.uint8: received}
        found = list[Received]()
        for numbers, given in zip(self._numbers, into, strict=True):
            of_part = dict[int, list[Tensor]]()
            for peer, span in numbers:
                views = [self._views[peer][number] for number in span]
                of_part[peer] = [_typed(typed, view.dtype).as_strided(*view.region) for view in views]
                if peer in given:
                    of_part[peer] = [own.copy_(x) for own, x in zip(given[peer], of_part[peer], strict=True)]
            found.append(of_part)
        return found


def _typed(views: dict[torch.dtype, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the received bytes as elements of `dtype`."""
    found = views.get(dtype)
    if found is None:
        found = views[dtype] = views[torch.uint8].view(dtype)
    return found


def as_received(into: Mapping[int, Sequence[Tensor]], received: Tensor) -> list[Received]:
    """Return the tensors of a single part by sender, of any shape, that lie in `received` [bytes] as they came."""
    return [{peer: list(tensors) for peer, tensors in into.items()}]


def _specs(facts: Flat) -> Iterator[TensorSpec]:
    pairs = iter(facts)
    for shape, dtype in zip(pairs, pairs, strict=True):
        yield TensorSpec(tuple(shape), dtype)  # type: ignore[arg-type]


def exchange_layout(axis: Axis, parts: Sequence[ExchangePart]) -> tuple[ExchangeLayout, Sequence[Tensor]]:
    """Return the layout of an exchange of parts in which all ranks of the axis take part, and the tensors it sends."""
    tensors, forms = list[Tensor](), list[PartForm]()
    for part in parts:
        sent = list[tuple[tuple[int, ...], Flat]]()
        for peers, found in part.outgoing:
            facts = list[object]()
            for x in found:
                facts += (x.shape, x.dtype)
            tensors += found
            sent.append((peers, tuple(facts)))
        forms.append((part.kind, tuple(sent), tuple(part.incoming.items())))
    return _exchange_layout(axis, tuple(forms)), tensors


@lru_cache(maxsize=LAYOUTS_KEPT)
def _exchange_layout(axis: Axis, forms: tuple[PartForm, ...]) -> ExchangeLayout:
    return ExchangeLayout(axis, forms)
