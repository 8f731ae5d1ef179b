"""One rank's part of a prediction: the weighted sums of its patches on a canvas."""

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
    """A prediction over the canvas, of all branches or combined; the guide's prediction; the anchor's mask."""

    prediction_BCHW: Tensor
    guide_BChw: Tensor | None = None
    mask_B1hw: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPrediction:
    """Weighted sums of this rank's patches on a canvas of all branches, and the positions that they cover: 0 elsewhere.

    `windows`: where patches lie on the canvas. A patch of `assignment` after them is the guide; `guide`: this rank's
    predictions of it by branch. `interlace`: set where the canvas is not an image but its interlaced patches, stacked
    along the rows. `mask`: (the owner's group rank, the spec, the tensor on the owner). `finish`: the answer, given the
    whole prediction. `regions`: where ranks need it, in the last step (True) or another; None for everywhere.
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
        """Number of guidance branches."""
        return len(self.canvas_KBCHW)

    @property
    def one_guide(self) -> Tensor:
        """Return an uninitialised tensor like the guide's prediction of one branch, [B, C, h, w]."""
        return self.canvas_KBCHW.new_empty((*self.canvas_KBCHW.shape[1:3], *(self.guide_size or ())), dtype=self.dtype)

    @property
    def own_mask(self) -> list[Tensor]:
        """Return the mask [B, 1, h, w] if this rank has it, else nothing."""
        return [] if self.mask is None or self.mask[2] is None else [self.mask[2]]

    def mask_spec(self, group_rank: int) -> list[TensorSpec]:
        """Return the spec of the mask if `group_rank` has it, else nothing."""
        return [] if self.mask is None or self.mask[0] != group_rank else [self.mask[1]]

    @property
    def can_wait(self) -> bool:
        """Whether an image holds everything on the canvas: padded patches do not fit."""
        return self.interlace is None or self.interlace.exact

    @property
    def image_BCHW(self) -> Tensor:
        """Return the canvas as an image with all branches in the batch, [K * B, C, H, W]; NaN where not this rank's."""
        canvas = self.canvas_KBCHW.flatten(0, 1).to(self.dtype).masked_fill(~self.covered_HW, math.nan)
        if self.interlace is None:
            return canvas
        patches = torch.stack(torch.split(canvas, self.interlace.patch_size[0], -2))
        others = patches.new_full((len(self.interlace) - len(patches), *patches.shape[1:]), math.nan)
        return self.interlace.join(torch.cat([patches, others]))

    def canvas_of(self, image_BCHW: Tensor) -> Tensor:
        """Return an image as a canvas, [B, C, H, W] of the canvas, 0 where this rank covers nothing."""
        if self.interlace is not None:
            count = self.windows.size[0] // self.interlace.patch_size[0]
            image_BCHW = torch.cat(list(self.interlace.split(image_BCHW)[:count]), -2)
        return image_BCHW.masked_fill(~self.covered_HW, 0)
