"""One rank's portion of a prediction: what its patches say of a canvas, and what is made of the whole."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.strategies.structure.all_gather import UnitAssignment
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.needed_regions import NeededRegions
from patchpar.strategies.structure.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePrediction:
    """A prediction over the canvas, of all branches or of what they were put together to; the guide's; a mask."""

    prediction_BCHW: Tensor
    guide_BChw: Tensor | None = None
    mask_B1hw: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPrediction:
    """Sums of own patches on a canvas of all branches, and which places of it they cover in any: 0 elsewhere.

    `windows`: where patches lie on the canvas. A patch of `assignment` beyond them is the guide; `guide` are its own
    predictions by branch. `interlace`: where the canvas is no picture but patches of one, one below the other.
    `mask`: of a place that has one, (its owner, its form, itself where it is ours). `finish`: what is answered, given
    the whole. `regions`: where ranks need that, in the last step or another one; None where all do everywhere.
    """

    canvas_KBCHW: Tensor
    covered_HW: Tensor
    dtype: torch.dtype
    windows: Windows
    assignment: UnitAssignment
    finish: Callable[[WholePrediction], Tensor]
    guide: Mapping[int, Tensor] = field(default_factory=dict)
    guide_size: tuple[int, int] | None = None
    interlace: Interlace | None = None
    mask: tuple[int, TensorSpec, Tensor | None] | None = None
    regions: Callable[[bool], NeededRegions] | None = None

    @property
    def branches(self) -> int:
        """Of guidance."""
        return len(self.canvas_KBCHW)

    @property
    def one_guide(self) -> Tensor:
        """The form of the guide's prediction of one branch."""
        return self.canvas_KBCHW.new_empty((*self.canvas_KBCHW.shape[1:3], *(self.guide_size or ())), dtype=self.dtype)

    @property
    def own_mask(self) -> list[Tensor]:
        """The mask, where it is ours."""
        return [] if self.mask is None or self.mask[2] is None else [self.mask[2]]

    def mask_spec(self, group_rank: int) -> list[TensorSpec]:
        """What a place has of the mask."""
        return [] if self.mask is None or self.mask[0] != group_rank else [self.mask[1]]

    @property
    def can_wait(self) -> bool:
        """Whether a picture has a place for everything on the canvas."""
        return self.interlace is None or self.interlace.exact

    @property
    def image_BCHW(self) -> Tensor:
        """The canvas of all branches as a picture. What is not ours is no number, and so is what is made of it."""
        canvas = self.canvas_KBCHW.flatten(0, 1).to(self.dtype).masked_fill(~self.covered_HW, math.nan)
        if self.interlace is None:
            return canvas
        patches = torch.stack(torch.split(canvas, self.interlace.patch_size[0], -2))
        others = patches.new_full((len(self.interlace) - len(patches), *patches.shape[1:]), math.nan)
        return self.interlace.join(torch.cat([patches, others]))

    def canvas_of(self, image_BCHW: Tensor) -> Tensor:
        """A picture as a canvas, 0 where it is not ours."""
        if self.interlace is not None:
            count = self.windows.size[0] // self.interlace.patch_size[0]
            image_BCHW = torch.cat(list(self.interlace.split(image_BCHW)[:count]), -2)
        return image_BCHW.masked_fill(~self.covered_HW, 0)
