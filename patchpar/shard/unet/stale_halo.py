"""Edge rows that a convolution sends for the next step, and those of the last one that it reads.

What follows from the shape of its band is found, and checked, for the first band that has it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from patchpar.comm.exchange_part import ExchangePart, Halo, Received
from patchpar.comm.transport import TensorSpec
from patchpar.plan.bands import Stencil
from patchpar.shard.local_patch import LocalPatch


class StaleRound(NamedTuple):
    """What is the same in every step of a convolution with a stale halo.

    `joins`: whether its band is joined with the halo. `before` and `after`: ranks whose rows are read. `first` and
    `last`: how many of this rank's rows others read. `part`: of the exchange, without tensors, which go to `receivers`,
    so many to each.
    """

    joins: bool
    before: int | None
    after: int | None
    first: int
    last: int
    part: ExchangePart
    receivers: tuple[tuple[tuple[int, ...], int], ...]

    @classmethod
    def of(cls, patch: LocalPatch, own: Tensor, stencil: Stencil, *, joins: bool) -> "StaleRound":
        """Return that of the band `own` [B, C, ..., h, W]. Raises PlanError, UnsupportedModel."""
        axis, edges = patch.axis, patch.edges(own, stencil.before, stencil.after)
        before, after = (rank if rank in edges.incoming else None for rank in (axis.before, axis.after))
        first, last = patch.rows_sent(stencil.before, stencil.after)
        if patch.policy.published:
            first = last = max(stencil.before, stencil.after)
        part = edges_to_send(patch, own, stencil)
        receivers = tuple((peers, len(tensors)) for peers, tensors in part.outgoing)
        return cls(joins, before, after, first, last, part._replace(outgoing=()), receivers)

    def halo(self, found: Received) -> Halo:
        """Return the neighbours' rows out of what was received for the last step."""
        before, after = self.before, self.after
        return Halo(None if before is None else found[before][0], None if after is None else found[after][0])

    def part_of(self, rows: Sequence[Tensor]) -> ExchangePart:
        """Return the exchange of this rank's rows [B, C, ..., r, W]: those that others read, in order."""
        outgoing, start, part = [], 0, self.part
        for peers, count in self.receivers:
            outgoing.append((peers, tuple(rows[start : start + count])))
            start += count
        return ExchangePart(part.kind, outgoing, part.incoming, axis=part.axis, to_all=part.to_all)


def edges_to_send(patch: LocalPatch, x: Tensor, stencil: Stencil) -> ExchangePart:
    """Return the exchange of edge rows of the band `x` [B, C, ..., h, W]: with the neighbours, or published with all.

    Both edges go to all ranks then, as DistriFusion has it (arXiv:2402.19481). Raises PlanError, UnsupportedModel.
    """
    if not patch.policy.published:
        return patch.edges(x, stencil.before, stencil.after)
    axis, dim, rows = patch.axis, patch.dim, max(stencil.before, stencil.after)
    ranks = tuple(axis.ranks[group_rank] for group_rank in axis.others)
    both = (x.narrow(dim, 0, rows), x.narrow(dim, x.shape[dim] - rows, rows))
    specs = tuple(TensorSpec.of(edge) for edge in both)
    return ExchangePart("halo", [(ranks, both)], dict.fromkeys(ranks, specs), axis=axis, to_all=True)


def of_neighbours(patch: LocalPatch, found: Received, stencil: Stencil) -> Received:
    """Return of both edges of all ranks those that this one reads."""
    axis, dim, nearest = patch.axis, patch.dim, {}
    if axis.rank > 0:
        rows = found[axis.ranks[axis.rank - 1]][1]
        nearest[axis.ranks[axis.rank - 1]] = [rows.narrow(dim, rows.shape[dim] - stencil.before, stencil.before)]
    if axis.rank + 1 < axis.size:
        rows = found[axis.ranks[axis.rank + 1]][0]
        nearest[axis.ranks[axis.rank + 1]] = [rows.narrow(dim, 0, stencil.after)]
    return nearest
