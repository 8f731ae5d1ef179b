"""The merge of partial predictions of all ranks, in two messages to each other rank.

    what a rank's patches cover of a band of rows is sent to the rank that completes the band
    every band and the guide are sent to all ranks, or to each rank the regions that it needs (`NeededRegions`)

Predictions are merged at once, every guidance branch by itself; or after the pipeline has combined its branches in
every partial prediction. The result is the same, since guidance is a weighted sum, with a fraction of the bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.comm.transport import TensorSpec
from patchpar.plan.bands import split_bands
from patchpar.strategies.structure.all_gather import (
    ANCHOR,
    LATENTS,
    MASK,
    PREDICTION,
    Sent,
    UnitAssignment,
    all_to_all,
    stack_spec,
    stacked,
    to_all,
)
from patchpar.strategies.structure.blending import BlendPlan, whole_of_bands
from patchpar.strategies.structure.guidance_fit import GuidanceFit, weighed
from patchpar.strategies.structure.needed_regions import NeededRegions
from patchpar.strategies.structure.partial_prediction import PartialPrediction, WholePrediction
from patchpar.strategies.structure.work_schedule import Unit, merged

GuideOf = Callable[[list[Tensor]], Mapping[Unit, Tensor]]


@dataclass(frozen=True, slots=True)
class PredictionMerge:
    """The merge over the ranks of an axis in one step. `silent`: nothing is exchanged; what others would send is 0."""

    mesh: AxisComm
    where: str
    silent: bool = False

    def at_once(self, partial_prediction: PartialPrediction) -> WholePrediction:
        """Merge every branch by itself. Raises ExchangeError."""
        own = {Unit(len(partial_prediction.windows), branch): x for branch, x in partial_prediction.guide.items()}
        whole = partial_prediction.canvas_KBCHW
        return self._merged(partial_prediction, whole, partial_prediction.assignment, lambda _: own)

    def after_guidance(
        self,
        partial_predictions: Sequence[PartialPrediction],
        combined_BCHW: Tensor,
        regions: NeededRegions | None = None,
    ) -> WholePrediction | None:
        """Merge what the pipeline has combined of the partial predictions of all denoiser calls of a step.

        `combined_BCHW`: on the canvas. `regions`: where each rank needs the whole; it is NaN elsewhere. None if the
        combination is not a weighted mean of the branches with the same weights everywhere. Raises ExchangeError.
        """
        last, gathered = partial_predictions[-1], list[GuidanceFit]()
        masks = [each.mask for each in partial_predictions if each.mask is not None]
        branches = torch.cat([each.canvas_KBCHW[:, :, : combined_BCHW.shape[1]] for each in partial_predictions])
        own = GuidanceFit.of(combined_BCHW, branches)
        guide = [x for each in partial_predictions for x in _all_branches(each)]

        def guide_of(extra: list[Tensor]) -> Mapping[Unit, Tensor]:
            gathered.append(sum((GuidanceFit(x) for x in extra[1:]), GuidanceFit(extra[0])))
            if not any(each.guide for each in partial_predictions):
                return {}
            return {Unit(len(last.windows), 0): weighed(gathered[0].weights_BK, torch.stack(guide)).to(last.dtype)}

        partial_prediction, canvas = replace(last, mask=masks[0] if masks else None), combined_BCHW.float()[None]
        whole = self._merged(partial_prediction, canvas, merged(last.assignment), guide_of, own.products, regions)
        return whole if gathered[0].is_mean else None

    def latents(self, own_BCHW: Tensor) -> Tensor:
        """Return complete latents x_BCHW from the band of rows of every rank. Raises ExchangeError."""
        axis, height = self.mesh[1], own_BCHW.shape[-2]
        bands = split_bands(height, axis.size, 1)
        band = own_BCHW[..., bands.starts[axis.rank] : bands.starts[axis.rank + 1], :]
        sizes = [bands.size(group_rank) for group_rank in range(axis.size)]
        return torch.cat(AllGather(*self.mesh, LATENTS, self.where).parts(band.contiguous(), -2, sizes), -2)

    def _merged(
        self,
        partial_prediction: PartialPrediction,
        own_GBCHW: Tensor,
        assignment: UnitAssignment,
        guide_of: GuideOf,
        extra: Tensor | None = None,
        regions: NeededRegions | None = None,
    ) -> WholePrediction:
        """Merge a canvas of G branches. `guide_of` gives this rank's part of the guide from `extra` of all ranks."""
        axis, dtype = self.mesh[1], partial_prediction.dtype
        blend = BlendPlan.of(partial_prediction.windows, assignment, len(own_GBCHW))
        band, gathered = blend.own_band(own_GBCHW, axis.rank, dtype), list[Tensor]()
        if axis.size > 1 and not self.silent:
            band, gathered = blend.band(self.mesh, self.where, own_GBCHW, dtype, extra)
        last = len(partial_prediction.windows)
        guides = [tuple(unit for unit in units if unit.patch == last) for units in assignment]
        sheets: _AllGatherExchange | _RegionExchange = _AllGatherExchange(blend, own_GBCHW, partial_prediction)
        if regions is not None:
            sheets = _RegionExchange(axis.rank, regions, own_GBCHW, partial_prediction)
        own = stacked(guides[axis.rank], guide_of(gathered))
        sent = {PREDICTION: sheets.band(band), ANCHOR: sheets.guide(own), MASK: to_all(partial_prediction.own_mask)}
        expected: dict[str, Callable[[int], list[TensorSpec]]] = {
            PREDICTION: sheets.band_spec,
            ANCHOR: lambda group_rank: sheets.guide_spec(guides[group_rank]),
            MASK: partial_prediction.mask_spec,
        }
        found = all_to_all(self.mesh, self.where, sent, expected, silent=self.silent)
        masks = [x for tensors in found for x in tensors[MASK]]
        of_guide = [sheets.guides(group_rank, each[ANCHOR]) for group_rank, each in enumerate(found)]
        return WholePrediction(
            prediction_BCHW=sheets.whole([tensors[PREDICTION] for tensors in found]),
            guide_BChw=_guide_of(guides, of_guide),
            mask_B1hw=masks[0] if masks else None,
        )


@dataclass(frozen=True, slots=True)
class _AllGatherExchange:
    """Bands and the guide, sent whole to every rank."""

    blend: BlendPlan
    like_GBCHW: Tensor
    partial_prediction: PartialPrediction

    def band(self, own: Tensor) -> Sent:
        return to_all([own])

    def band_spec(self, group_rank: int) -> list[TensorSpec]:
        return self.blend.band_spec(group_rank, self.like_GBCHW, self.partial_prediction.dtype)

    def whole(self, found: Sequence[Sequence[Tensor]]) -> Tensor:
        return whole_of_bands([tensors[0] for tensors in found])

    def guide(self, own: Sequence[Tensor]) -> Sent:
        return to_all(own)

    def guide_spec(self, units: tuple[Unit, ...]) -> list[TensorSpec]:
        return stack_spec(units, self.partial_prediction.one_guide)

    def guides(self, group_rank: int, found: Sequence[Tensor]) -> Sequence[Tensor]:
        return found


@dataclass(frozen=True, slots=True)
class _RegionExchange:
    """Bands and the guide, of which each rank gets the regions that it needs."""

    rank: int
    regions: NeededRegions
    like_GBCHW: Tensor
    partial_prediction: PartialPrediction

    def band(self, own: Tensor) -> Sent:
        return lambda group_rank: self.regions.part(own, self.rank, group_rank)

    def band_spec(self, group_rank: int) -> list[TensorSpec]:
        return self.regions.part_spec(self.like_GBCHW, self.partial_prediction.dtype, group_rank, self.rank)

    def whole(self, found: Sequence[Sequence[Tensor]]) -> Tensor:
        return self.regions.whole(self.rank, found).flatten(0, 1)

    def guide(self, own: Sequence[Tensor]) -> Sent:
        return lambda group_rank: own if group_rank == self.rank else self.regions.guide_part(own, group_rank)

    def guide_spec(self, units: tuple[Unit, ...]) -> list[TensorSpec]:
        return self.regions.guide_spec(stack_spec(units, self.partial_prediction.one_guide), self.rank)

    def guides(self, group_rank: int, found: Sequence[Tensor]) -> Sequence[Tensor]:
        size = self.partial_prediction.guide_size
        if group_rank == self.rank or size is None:
            return found
        return [self.regions.guide(self.rank, x, size) for x in found]


def _guide_of(guides: UnitAssignment, found: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """Return all branches in order, x_BChw; predictions of one branch on several ranks are summed."""
    by_branch: dict[int, Tensor] = {}
    for units, tensors in zip(guides, found, strict=True):
        for unit, x in zip(units, tensors[0] if units else (), strict=True):
            by_branch[unit.branch] = by_branch[unit.branch] + x if unit.branch in by_branch else x
    return torch.cat([by_branch[branch] for branch in sorted(by_branch)]) if by_branch else None


def _all_branches(partial_prediction: PartialPrediction) -> list[Tensor]:
    """Return the guide's predictions of all branches, 0 for those of other ranks."""
    nothing = torch.zeros_like(next(iter(partial_prediction.guide.values()), partial_prediction.one_guide))
    return [partial_prediction.guide.get(branch, nothing) for branch in range(partial_prediction.branches)]
