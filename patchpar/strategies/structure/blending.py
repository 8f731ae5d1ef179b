"""Blending of windows on many ranks: weighted sums are reduced at the rank that owns a band of rows.

    rank 0    windows 0 1 2   -- what they cover of band 1 -->   rank 1: its band is complete
    rank 1    windows 3 4 5   -- what they cover of band 0 -->   rank 0: its band is complete

Windows are assigned in the order of rows, so that a rank covers mostly its own band. Then an all-gather of the bands
gives every rank the whole prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm
from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.plan.bands import Bands, split_bands
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.all_gather import UnitAssignment
from patchpar.strategies.structure.windows import Windows
from patchpar.strategies.structure.work_schedule import Unit

KIND, WEIGHTS = "windows", "weights"


@dataclass(frozen=True, slots=True)
class CoveredRegion:
    """Rows and columns of one branch that one rank's windows cover within a band."""

    branch: int
    rows: slice
    columns: slice

    def of(self, x_GBCHW: Tensor) -> Tensor:
        """Return this region of x_GBCHW, which holds all G branches of the whole image, as a view: [B, C, h, w]."""
        return x_GBCHW[self.branch, ..., self.rows, self.columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendPlan:
    """Windows, their assignment to ranks, and the band of rows that each rank completes. `branches`: of guidance."""

    windows: Windows
    assignment: UnitAssignment
    bands: Bands
    branches: int

    @classmethod
    def of(cls, windows: Windows, assignment: UnitAssignment, branches: int) -> "BlendPlan":
        """Return the plan with bands as equal as possible."""
        return cls(
            windows=windows,
            assignment=assignment,
            bands=split_bands(windows.size[0], len(assignment), 1),
            branches=branches,
        )

    def pieces(self, group_rank: int, owner: int) -> list[CoveredRegion]:
        """Return what `group_rank` covers of the band of `owner`: rows under the same windows, as wide as these."""
        band = self.bands.starts[owner], self.bands.starts[owner + 1]
        found = []
        for branch, numbers in self._covered(group_rank).items():
            tops = [(self.windows.corners[number][0], number) for number in numbers]
            height = self.windows.window[0]
            edges = {row for top, _ in tops for row in (top, top + height) if band[0] < row < band[1]}
            for rows in pairwise(sorted({*band, *edges})):
                within = [number for top, number in tops if top <= rows[0] and rows[1] <= top + height]
                if within:
                    found.append(CoveredRegion(branch, slice(*rows), self.windows.columns(within)))
        return found

    def _covered(self, group_rank: int) -> dict[int, list[int]]:
        """Return the windows of a rank by branch."""
        found: dict[int, list[int]] = {}
        for unit in self.assignment[group_rank]:
            if unit.patch < len(self.windows):
                found.setdefault(unit.branch, []).append(unit.patch)
        return found

    def sums(self, predictions: Mapping[Unit, Tensor], like: Tensor) -> Tensor:
        """Return weighted sums of windows, [B, C, h, w] each, on a canvas of all branches: x_GBCHW in float32."""
        shape = (self.branches, *like.shape[:-2], *self.windows.size)
        canvas = torch.zeros(shape, dtype=torch.float32, device=like.device)
        for unit, prediction in predictions.items():
            if unit.patch < len(self.windows):
                weight = self.windows.weight(unit.patch).to(prediction.device)
                self.windows.cut(canvas[unit.branch], unit.patch).add_(prediction.float() * weight)
        return canvas

    def covered(self, group_rank: int, like: Tensor) -> Tensor:
        """Return where a rank has windows of any branch: bool, [H, W], on the device of `like`."""
        canvas = torch.zeros(self.windows.size, dtype=torch.bool, device=like.device)
        for numbers in self._covered(group_rank).values():
            for number in numbers:
                self.windows.cut(canvas, number).fill_(True)
        return canvas

    def band(
        self, mesh: AxisComm, where: str, own_GBCHW: Tensor, dtype: torch.dtype, extra: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return this rank's band of the whole prediction, complete: x_GBChW; and `extra` of all ranks, in order.

        `own_GBCHW`: weighted sums of this rank. `extra`: of any shape, the same on every rank. Raises ExchangeError.
        """
        comm, axis = mesh
        outgoing, incoming = [], {}
        for group_rank in axis.others:
            pieces = self.pieces(axis.rank, group_rank)
            if pieces:
                leaving = torch.cat([piece.of(own_GBCHW).flatten() for piece in pieces]).to(dtype)
                outgoing.append(((axis.ranks[group_rank],), (leaving,)))
            sizes = self._sizes(group_rank, axis.rank, own_GBCHW)
            if sizes:
                incoming[axis.ranks[group_rank]] = (TensorSpec((sum(sizes),), dtype),)
        parts = [ExchangePart(KIND, outgoing, incoming)] + ([] if extra is None else [_extra_part(axis, extra)])
        whole = own_GBCHW.clone()
        received, *from_others = comm.exchange(where, parts).wait()
        for peer, (flat,) in received.items():
            group_rank = axis.ranks.index(peer)
            sums = torch.split(flat, self._sizes(group_rank, axis.rank, own_GBCHW))
            for piece, x in zip(self.pieces(group_rank, axis.rank), sums, strict=True):
                rows = piece.of(whole)
                rows.add_(x.view(rows.shape))
        others = {axis.ranks.index(peer): x for each in from_others for peer, (x,) in each.items()}
        of_all = (
            [extra if group_rank == axis.rank else others[group_rank] for group_rank in range(axis.size)]
            if from_others
            else []
        )
        return self.own_band(whole, axis.rank, dtype), [x for x in of_all if x is not None]

    def _sizes(self, group_rank: int, owner: int, like_GBCHW: Tensor) -> list[int]:
        """Return the number of elements of each piece of a rank."""
        return [piece.of(like_GBCHW).numel() for piece in self.pieces(group_rank, owner)]

    def own_band(self, whole_GBCHW: Tensor, group_rank: int, dtype: torch.dtype) -> Tensor:
        """Return the band of a rank: x_GBChW."""
        return whole_GBCHW[..., self.bands.starts[group_rank] : self.bands.starts[group_rank + 1], :].to(dtype)

    def band_spec(self, group_rank: int, like_GBCHW: Tensor, dtype: torch.dtype) -> list[TensorSpec]:
        """Return the spec of `band` on another rank, x_GBChW."""
        return [TensorSpec((*like_GBCHW.shape[:-2], self.bands.size(group_rank), like_GBCHW.shape[-1]), dtype)]


def _extra_part(axis: Axis, extra: Tensor) -> ExchangePart:
    peers = tuple(axis.ranks[group_rank] for group_rank in axis.others)
    return ExchangePart(WEIGHTS, [(peers, (extra,))], {peer: (TensorSpec.of(extra),) for peer in peers})


def whole_of_bands(bands: Sequence[Tensor]) -> Tensor:
    """Return the bands x_GBChW of all ranks joined, all branches as one batch: [G * B, C, H, W]."""
    return torch.cat(list(bands), -2).flatten(0, 1)
