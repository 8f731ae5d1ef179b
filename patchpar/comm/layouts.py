"""Sizes and messages of an exchange, computed once for tensors of these shapes: a denoiser repeats it in every step.

Of exchanges that are one operation of all ranks of an axis, with one buffer that is sent and one that is received:

    GatherLayout    a tensor of each rank, of the same shape
    EdgeLayout      moments to all ranks and edge rows to the neighbours, as bytes
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart, Halo, MomentRows, Received
from patchpar.comm.kernels.fused_op import is_fused
from patchpar.comm.kernels.pack_tensors import MOST_TENSORS, write_pieces, write_pieces_eager
from patchpar.comm.transport import FlatParts, Incoming, TensorSpec
from patchpar.comm.transport.packing import LAYOUTS_KEPT, row_of
from patchpar.plan.mesh import Axis

Specs = tuple[TensorSpec, ...]
Flat = tuple[Any, ...]
Sent = tuple[tuple[tuple[int, ...], TensorSpec], ...]  # receivers, and what they get
Expected = tuple[tuple[int, Specs], ...]  # by sender


class GatherLayout(NamedTuple):
    """A gather of parts into `joined`, one after the other in the first dim, which is a view of `stacked` [P, ...].

    `incoming`: what comes of the others. `num_bytes`: sent, and received.
    """

    joined: tuple[int, ...]
    stacked: tuple[int, ...]
    incoming: tuple[Incoming, ...]
    num_bytes: int

    def as_stacked(self, rows: Tensor) -> Tensor:
        """Return what has been gathered, [P, ...]."""
        return rows.view(self.stacked)


@lru_cache(maxsize=LAYOUTS_KEPT)
def gather_layout(axis: Axis, shape: tuple[int, ...], dtype: torch.dtype) -> GatherLayout:
    """Return the layout of a gather of tensors of one `shape` and dtype."""
    spec = TensorSpec(tuple(shape), dtype)
    incoming = tuple(Incoming(axis.ranks[other], (spec,)) for other in axis.others)
    stacked = (axis.size, *spec.shape)
    joined = (axis.size * spec.shape[0], *spec.shape[1:]) if spec.shape else stacked
    return GatherLayout(joined, stacked, incoming, len(incoming) * spec.num_bytes)


class AllToAllLayout(NamedTuple):
    """Parts for each rank. `incoming`: what comes of the others. `sent` and `received`: bytes."""

    incoming: tuple[Incoming, ...]
    sent: int
    received: int


@lru_cache(maxsize=LAYOUTS_KEPT)
def all_to_all_layout(axis: Axis, own: tuple[int, ...], into: tuple[int, ...], dtype: torch.dtype) -> AllToAllLayout:
    """Return the layout of an exchange of flat parts of `own` and `into` elements."""
    expected = [(axis.ranks[other], TensorSpec((into[other],), dtype)) for other in axis.others if into[other]]
    sent = sum(own[other] for other in axis.others) * dtype.itemsize
    incoming = tuple(Incoming(rank, (spec,)) for rank, spec in expected)
    return AllToAllLayout(incoming, sent, sum(spec.num_bytes for _, spec in expected))


class TensorView(NamedTuple):
    """A contiguous tensor in a buffer of its dtype. `region`: shape, strides, and the element where it begins."""

    dtype: torch.dtype
    region: tuple[tuple[int, ...], tuple[int, ...], int]

    @classmethod
    def at(cls, spec: TensorSpec, first_byte: int) -> "TensorView":
        strides, size = list[int](), 1
        for length in reversed(spec.shape):
            strides.append(size)
            size *= length
        return cls(spec.dtype, (spec.shape, tuple(reversed(strides)), first_byte // spec.dtype.itemsize))


class EdgeLayout:
    """A round of moments to all ranks and edge rows to the neighbours, packed as `transport.packing` packs messages.

    Buffers have the smallest of the dtypes, in which tensors of others lie aligned. `shared`: specs of what all ranks
    send to all. `sent` and `expected`: of edge rows. `booked`: kind, bytes sent and bytes received of each part.
    `bytes_to`: of the message to each other rank, by kind. `incoming`: what comes of the others. A single shared tensor
    goes to this rank too, so that those of all ranks lie in the buffer that is received.
    """

    def __init__(self, axis: Axis, shared: Specs, sent: Sent, expected: Expected) -> None:
        self._axis, self._num_shared, self.ranks = axis, len(shared), axis.ranks
        self._to_itself = shared if len(shared) == 1 else ()
        self.label = "moments+halo" if shared else "halo"
        num_shared = len(axis.others) * sum(spec.num_bytes for spec in shared)
        moments = [("moments", num_shared, num_shared)] if shared else []
        rows_out = sum(len(peers) * spec.num_bytes for peers, spec in sent)
        self.booked = (*moments, ("halo", rows_out, sum(spec.num_bytes for _, (spec,) in expected)))
        to_each = {"moments": sum(spec.num_bytes for spec in shared)} if shared else {}
        self.bytes_to = {rank: to_each.copy() for rank in axis.other_ranks if shared}
        for peers, spec in sent:
            for peer in peers:
                self.bytes_to.setdefault(peer, {})["halo"] = spec.num_bytes
        specs = [*shared, *(spec for _, spec in sent)]
        dtypes = {spec.dtype for spec in (*specs, *(spec for _, (spec,) in expected))}
        self._dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
        self._others = tuple(dtypes - {self._dtype})
        self._plan_sending(specs, sent)
        self._plan_receiving(shared, expected)

    def _plan_sending(self, specs: Sequence[TensorSpec], sent: Sent) -> None:
        axis, itemsize = self._axis, self._dtype.itemsize
        by_rank: dict[int, list[int]] = {rank: list(range(self._num_shared)) for rank in axis.ranks}
        by_rank[axis.ranks[axis.rank]] = list(range(len(self._to_itself)))
        for number, (peers, _) in enumerate(sent, self._num_shared):
            for peer in peers:
                by_rank[peer].append(number)
        numbers = [by_rank[rank] for rank in axis.ranks]
        row = row_of(tuple(tuple(specs[number] for number in found) for found in numbers))
        self._sizes_sent = [size // itemsize for size in row.sizes]
        self._size_sent = row.size // itemsize
        pieces = list[int]()
        for found, layout, start in zip(numbers, row.layouts, row.starts, strict=True):
            for number, offset in zip(found, layout.offsets, strict=True):
                pieces += (number, (start + offset * layout.dtype.itemsize) // itemsize)
        self._pieces = tuple(pieces)
        self._is_few = 0 < len(specs) <= MOST_TENSORS

    def _plan_receiving(self, shared: Specs, expected: Expected) -> None:
        axis = self._axis
        pending: dict[int, list[TensorSpec]] = {axis.ranks[other]: list(shared) for other in axis.others if shared}
        for peer, found in expected:
            pending.setdefault(peer, []).extend(found)
        self.incoming = tuple(Incoming(peer, tuple(found)) for peer, found in pending.items())
        pending[axis.ranks[axis.rank]] = list(self._to_itself)
        row = row_of(tuple(tuple(pending.get(rank, ())) for rank in axis.ranks))
        self._sizes_received = [size // self._dtype.itemsize for size in row.sizes]
        self._size_received = sum(self._sizes_received)
        views: dict[int, list[TensorView]] = {}
        for rank, layout, start in zip(axis.ranks, row.layouts, row.starts, strict=True):
            starts = [start + offset * layout.dtype.itemsize for offset in layout.offsets]
            views[rank] = [TensorView.at(*each) for each in zip(layout.specs, starts, strict=True)]
        rows_of = {peer: views[peer][-1] for peer, _ in expected}
        self._row_views = [None if rank is None else rows_of.get(rank) for rank in (axis.before, axis.after)]
        others = axis.others if shared else ()
        self._shared_views = [(p, view) for p in others for view in views[axis.ranks[p]][: self._num_shared]]
        first = [views[rank][0] for rank in axis.ranks] if self._to_itself else []
        self._starts = tuple(view.region[2] for view in first)
        self._moments = first[0].dtype if first else self._dtype

    def buffers(
        self, tensors: Sequence[Tensor], device: torch.device, *, fused: bool | None = None
    ) -> tuple[FlatParts, FlatParts]:
        """Return the elements sent to each rank, and a buffer for those received.

        `tensors`: what is shared, then edge rows, of any shape. `fused`: whether `is_fused` of these, if it is known.
        """
        sent = torch.empty(self._size_sent, dtype=self._dtype, device=device)
        if self._is_few and (is_fused(sent) if fused is None else fused):
            write_pieces.fused(sent, tensors, self._pieces)
        elif tensors:
            write_pieces_eager(sent, tensors, self._pieces)
        received = torch.empty(self._size_received, dtype=self._dtype, device=device)
        # Alike on all ranks, as each has a neighbour, and sends and receives the rows before or after a band.
        return FlatParts(sent, self._sizes_sent, True), FlatParts(received, self._sizes_received)

    def unpack(self, received: Tensor) -> tuple[Received, Halo]:
        """Return the other ranks' shared tensors by group rank, and the neighbours' rows.

        Views of `received` [elements].
        """
        shared: dict[int, list[Tensor]] = {}
        for other, (dtype, region) in self._shared_views:
            typed = received if dtype == self._dtype else received.view(dtype)
            shared.setdefault(other, []).append(typed.as_strided(*region))
        return shared, self.unpack_moments(received)[1]

    def unpack_moments(self, received: Tensor) -> tuple[MomentRows, Halo]:
        """Return the moments of all ranks, if they are the only tensors that are shared, and the neighbours' rows.

        Views of `received` [elements].
        """
        typed = {self._dtype: received}
        for dtype in self._others:
            typed[dtype] = received.view(dtype)
        before, after = self._row_views
        return (typed[self._moments], self._starts), Halo(
            None if before is None else typed[before.dtype].as_strided(*before.region),
            None if after is None else typed[after.dtype].as_strided(*after.region),
        )


def edge_layout(axis: Axis, shared: Sequence[Tensor], edges: ExchangePart) -> tuple[EdgeLayout, Sequence[Tensor]]:
    """Return the layout of a round of `shared`, tensors of any shape, and `edges`, as `edges_part` returns them.

    Also all tensors that are sent, of any shape.
    """
    sent = edges.outgoing
    if len(shared) == 1 and len(sent) == 2:  # a norm between two neighbours, in every step: no loops
        (own,), ((before, (first,)), (after, (last,))) = shared, sent
        described: Flat = (own.shape, own.dtype)
        rows: Flat = (before, first.shape, first.dtype, after, last.shape, last.dtype)
        tensors: Sequence[Tensor] = (own, first, last)
    else:
        described = tuple(fact for x in shared for fact in (x.shape, x.dtype))
        rows = tuple(fact for peers, (x,) in sent for fact in (peers, x.shape, x.dtype))
        tensors = (*shared, *(x for _, (x,) in sent))
    return _edge_layout(axis, described, rows, tuple(edges.incoming.items())), tensors


@lru_cache(maxsize=LAYOUTS_KEPT)
def _edge_layout(axis: Axis, shared: Flat, sent: Flat, expected: Expected) -> EdgeLayout:
    """Return the layout for shapes and dtypes in turns; before each of those sent, its receivers."""
    specs = tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in zip(shared[::2], shared[1::2], strict=True))
    rows = zip(sent[::3], sent[1::3], sent[2::3], strict=True)
    return EdgeLayout(
        axis, specs, tuple((peers, TensorSpec(tuple(shape), dtype)) for peers, shape, dtype in rows), expected
    )
