"""How ranks make a whole of their portions of a prediction, in two messages to each other rank.

    what a rank's patches cover of a band of rows goes to the rank that completes the band
    every band, and what leads the rest, goes to all; or of both to each what it needs (`NeededRegions`)

They meet at once, every branch of guidance by itself; or after the pipeline has put its branches together in every
portion, which comes to the same, guidance being a weighted sum, and is a fraction of the bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.plan.bands import split_bands
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.all_gather import (
    ANCHOR,
    LATENTS,
    MASK,
    PREDICTION,
    Sent,
    UnitAssignment,
    from_everyone,
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
    """The ranks of an axis, at a step. `silent`: nothing is heard of others, and what they would send is 0."""

    mesh: tuple[Communicator, Axis]
    where: str
    silent: bool = False

    def at_once(self, portion: PartialPrediction) -> WholePrediction:
        """Every branch by itself. Raises ExchangeError."""
        own = {Unit(len(portion.windows), branch): x for branch, x in portion.guide.items()}
        return self._met(portion, portion.canvas_KBCHW, portion.shares, lambda _: own)

    def after_guidance(
        self, portions: Sequence[PartialPrediction], combined_BCHW: Tensor, regions: NeededRegions | None = None
    ) -> WholePrediction | None:
        """What the pipeline has made of the portions of all denoiser calls of a step, each the same patches.

        `combined`: on the canvas. `regions`: where each rank needs the whole; elsewhere it is no number. None where
        that is no weighted mean of the branches, or another one elsewhere. Raises ExchangeError.
        """
        last, heard = portions[-1], list[GuidanceFit]()
        masks = [portion.mask for portion in portions if portion.mask is not None]
        branches = torch.cat([portion.canvas_KBCHW[:, :, : combined_BCHW.shape[1]] for portion in portions])
        own = GuidanceFit.of(combined_BCHW, branches)
        guide = [x for portion in portions for x in _all_branches(portion)]

        def guide_of(told: list[Tensor]) -> Mapping[Unit, Tensor]:
            heard.append(sum((GuidanceFit(x) for x in told[1:]), GuidanceFit(told[0])))
            if not any(portion.guide for portion in portions):
                return {}
            return {Unit(len(last.windows), 0): weighed(heard[0].weights_BK, torch.stack(guide)).to(last.dtype)}

        portion, canvas = replace(last, mask=masks[0] if masks else None), combined_BCHW.float()[None]
        whole = self._met(portion, canvas, merged(last.shares), guide_of, own.products, regions)
        return whole if heard[0].is_mean else None

    def latents(self, own_BCHW: Tensor) -> Tensor:
        """Latents of which every rank has its band of rows, whole again. Raises ExchangeError."""
        axis, height = self.mesh[1], own_BCHW.shape[-2]
        bands = split_bands(height, axis.size, 1)
        band = own_BCHW[..., bands.starts[axis.rank] : bands.starts[axis.rank + 1], :]

        def spec(place: int) -> list[TensorSpec]:
            return [TensorSpec((*own_BCHW.shape[:-2], bands.size(place), own_BCHW.shape[-1]), own_BCHW.dtype)]

        found = from_everyone(self.mesh, self.where, {LATENTS: to_all([band])}, {LATENTS: spec})
        return torch.cat([tensors[LATENTS][0] for tensors in found], -2)

    def _met(
        self,
        portion: PartialPrediction,
        own_GBCHW: Tensor,
        shares: UnitAssignment,
        guide_of: GuideOf,
        told: Tensor | None = None,
        regions: NeededRegions | None = None,
    ) -> WholePrediction:
        """The whole of a canvas of G branches. `guide_of` gives our part of the guide, once all have `told`."""
        axis, dtype = self.mesh[1], portion.dtype
        blend = BlendPlan.of(portion.windows, shares, len(own_GBCHW))
        band, heard = blend.own_band(own_GBCHW, axis.rank, dtype), list[Tensor]()
        if axis.size > 1 and not self.silent:
            band, heard = blend.band(self.mesh, self.where, own_GBCHW, dtype, told)
        guides = [tuple(unit for unit in units if unit.patch == len(portion.windows)) for units in shares]
        sheets: _AllGatherExchange | _RegionExchange = _AllGatherExchange(blend, own_GBCHW, portion)
        if regions is not None:
            sheets = _RegionExchange(axis.rank, regions, own_GBCHW, portion)
        own = stacked(guides[axis.rank], guide_of(heard))
        sent = {PREDICTION: sheets.band(band), ANCHOR: sheets.guide(own), MASK: to_all(portion.own_mask)}
        expected: dict[str, Callable[[int], list[TensorSpec]]] = {
            PREDICTION: sheets.band_spec,
            ANCHOR: lambda place: sheets.guide_spec(guides[place]),
            MASK: portion.mask_spec,
        }
        found = from_everyone(self.mesh, self.where, sent, expected, silent=self.silent)
        masks = [x for tensors in found for x in tensors[MASK]]
        return WholePrediction(
            prediction_BCHW=sheets.whole([tensors[PREDICTION] for tensors in found]),
            guide_BChw=_guide_of(guides, [sheets.guides(place, each[ANCHOR]) for place, each in enumerate(found)]),
            mask_B1hw=masks[0] if masks else None,
        )


@dataclass(frozen=True, slots=True)
class _AllGatherExchange:
    """Bands and the guide as they are sent to every rank, and come from it."""

    blend: BlendPlan
    like_GBCHW: Tensor
    portion: PartialPrediction

    def band(self, own: Tensor) -> Sent:
        return to_all([own])

    def band_spec(self, place: int) -> list[TensorSpec]:
        return self.blend.band_spec(place, self.like_GBCHW, self.portion.dtype)

    def whole(self, found: Sequence[Sequence[Tensor]]) -> Tensor:
        return whole_of_bands([tensors[0] for tensors in found])

    def guide(self, own: Sequence[Tensor]) -> Sent:
        return to_all(own)

    def guide_spec(self, units: tuple[Unit, ...]) -> list[TensorSpec]:
        return stack_spec(units, self.portion.one_guide)

    def guides(self, place: int, found: Sequence[Tensor]) -> Sequence[Tensor]:
        return found


@dataclass(frozen=True, slots=True)
class _RegionExchange:
    """The same where each rank gets of both what it needs."""

    rank: int
    regions: NeededRegions
    like_GBCHW: Tensor
    portion: PartialPrediction

    def band(self, own: Tensor) -> Sent:
        return lambda place: self.regions.part(own, self.rank, place)

    def band_spec(self, place: int) -> list[TensorSpec]:
        return self.regions.part_spec(self.like_GBCHW, self.portion.dtype, place, self.rank)

    def whole(self, found: Sequence[Sequence[Tensor]]) -> Tensor:
        return self.regions.whole(self.rank, found).flatten(0, 1)

    def guide(self, own: Sequence[Tensor]) -> Sent:
        return lambda place: own if place == self.rank else self.regions.guide_part(own, place)

    def guide_spec(self, units: tuple[Unit, ...]) -> list[TensorSpec]:
        return self.regions.guide_spec(stack_spec(units, self.portion.one_guide), self.rank)

    def guides(self, place: int, found: Sequence[Tensor]) -> Sequence[Tensor]:
        size = self.portion.guide_size
        if place == self.rank or size is None:
            return found
        return [self.regions.guide(self.rank, x, size) for x in found]


def _guide_of(guides: UnitAssignment, found: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """All branches in order; what several places have of one branch is added up."""
    by_branch: dict[int, Tensor] = {}
    for units, tensors in zip(guides, found, strict=True):
        for unit, x in zip(units, tensors[0] if units else (), strict=True):
            by_branch[unit.branch] = by_branch[unit.branch] + x if unit.branch in by_branch else x
    return torch.cat([by_branch[branch] for branch in sorted(by_branch)]) if by_branch else None


def _all_branches(portion: PartialPrediction) -> list[Tensor]:
    """Predictions of the guide, 0 for branches of others."""
    nothing = torch.zeros_like(next(iter(portion.guide.values()), portion.one_guide))
    return [portion.guide.get(branch, nothing) for branch in range(portion.branches)]
