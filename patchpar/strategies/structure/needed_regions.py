"""Where a rank needs a prediction: below the switch no rank needs all of it before the image is done.

    its windows, with every shift        it denoises them in the next steps
    its band of rows                     it completes predictions there, and holds these latents at the end
    every s-th position                  if it evaluates the anchor, which consists of them

Elsewhere its latents are NaN, and so is what is computed from them. The correction of windows is interpolated between
samples of the guide, so that a few samples around a region are needed as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.transport import TensorSpec
from patchpar.plan.bands import Bands, split_bands
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.windows import Zone
from patchpar.strategies.structure.work_schedule import Schedule

AROUND = 2  # samples on either side, of which bicubic interpolation reads at most two


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The work of all ranks in every step below the switch, a function of the size alone.

    `zones`: where each window can be. `schedule`: which rank evaluates which window, and the guide, if there is one: it
    is the patch after the last window.
    """

    zones: tuple[Zone, ...]
    schedule: Schedule
    interlace: Interlace

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the axis."""
        return len(self.schedule.assignment)

    @property
    def bands(self) -> Bands:
        """The band of rows that each rank completes."""
        return split_bands(self.interlace.size[0], self.num_ranks, 1)

    @property
    def guided(self) -> bool:
        """Whether there is a guide."""
        return any(unit.patch == len(self.zones) for units in self.schedule.assignment for unit in units)

    def wanted(self, group_rank: int, *, last: bool) -> Tensor:
        """Return where a rank needs the prediction: bool, [H, W]. After the `last` step no window follows."""
        found = torch.zeros(self.interlace.size, dtype=torch.bool)
        found[self.bands.starts[group_rank] : self.bands.starts[group_rank + 1]] = True
        units = () if last else (*self.schedule.whole_units[group_rank], *self.schedule.split_units[group_rank])
        for patch in {unit.patch for unit in units}:
            if patch == len(self.zones):
                found.view(-1)[self.interlace.anchor_positions] = True
            else:
                (top, bottom), (left, right) = self.zones[patch]
                found[top:bottom, left:right] = True
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeededRegions:
    """What every rank needs, as indices into flattened maps: the same on all ranks, without communication.

    `parts`: into a prediction of `size` (H, W), by rank and then by the owner of the band, [count] each. `cells`: into
    the guide's prediction, by rank, [count] each.
    """

    size: tuple[int, int]
    bands: Bands
    parts: tuple[tuple[Tensor, ...], ...]
    cells: tuple[Tensor, ...]

    @classmethod
    def of(cls, window_plan: WindowPlan, *, last: bool = False, device: torch.device | None = None) -> "NeededRegions":
        """Return the regions of a step, or of the `last` one."""
        interlace, bands = window_plan.interlace, window_plan.bands
        wanted = [window_plan.wanted(group_rank, last=last) for group_rank in range(window_plan.num_ranks)]
        samples = interlace.anchor_positions if window_plan.guided else torch.zeros(0, dtype=torch.long)
        around = [_around(each, interlace) if window_plan.guided else each.new_zeros(0) for each in wanted]
        parts = [tuple(_by_band(each, samples[cells], bands)) for each, cells in zip(wanted, around, strict=True)]
        return cls(
            size=interlace.size,
            bands=bands,
            parts=tuple(tuple(part.to(device) for part in each) for each in parts),
            cells=tuple(cells.nonzero()[:, 0].to(device) for cells in around),
        )

    def part(self, band_XhW: Tensor, owner: int, group_rank: int) -> list[Tensor]:
        """Return what a rank needs of the owner's band_XhW: [X, count], or nothing; the owner keeps all of it."""
        if owner == group_rank:
            return [band_XhW]
        needed, first = self.parts[group_rank][owner], self.bands.starts[owner] * self.size[1]
        return [band_XhW.flatten(-2).index_select(-1, needed - first)] if len(needed) else []

    def part_spec(self, like_XHW: Tensor, dtype: torch.dtype, owner: int, group_rank: int) -> list[TensorSpec]:
        """Return the spec of `part` for another rank: [X, count]."""
        count = len(self.parts[group_rank][owner])
        return [TensorSpec((*like_XHW.shape[:-2], count), dtype)] if count else []

    def whole(self, group_rank: int, found: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the parts `found` of every band, by owner, as a map [X, H, W], NaN where the rank needs none."""
        (own_XhW,) = found[group_rank]
        whole = own_XhW.new_full((*own_XhW.shape[:-2], *self.size), torch.nan)
        flat = whole.view(*own_XhW.shape[:-2], -1)
        for owner, tensors in enumerate(found):
            if owner == group_rank:
                whole[..., self.bands.starts[group_rank] : self.bands.starts[group_rank + 1], :] = own_XhW
            elif tensors:
                flat.index_copy_(-1, self.parts[group_rank][owner], tensors[0])
        return whole

    def guide_part(self, stack_Xhw: Sequence[Tensor], group_rank: int) -> list[Tensor]:
        """Return what another rank needs of the guide's prediction: [X, count], or nothing where there is none."""
        return [x.flatten(-2).index_select(-1, self.cells[group_rank]) for x in stack_Xhw]

    def guide_spec(self, stack: Sequence[TensorSpec], group_rank: int) -> list[TensorSpec]:
        """Return the specs of `guide_part` for predictions of these specs."""
        return [TensorSpec((*spec.shape[:-2], len(self.cells[group_rank])), spec.dtype) for spec in stack]

    def guide(self, group_rank: int, x_XN: Tensor, size: tuple[int, int]) -> Tensor:
        """Return a received `guide_part` as a map of `size`, [X, h, w], NaN where this rank needs none."""
        flat = x_XN.new_full((*x_XN.shape[:-1], size[0] * size[1]), torch.nan)
        return flat.index_copy_(-1, self.cells[group_rank], x_XN).view(*x_XN.shape[:-1], *size)


def _around(wanted_HW: Tensor, interlace: Interlace) -> Tensor:
    """Return which samples of the guide, flattened, the wanted predictions depend on: bool."""
    inside = interlace.split(wanted_HW[None, None].float()).amax(0)
    return F.max_pool2d(inside, 2 * AROUND + 1, stride=1, padding=AROUND).flatten() > 0


def _by_band(wanted_HW: Tensor, samples_N: Tensor, bands: Bands) -> Iterator[Tensor]:
    """Yield for every band the flat indices wanted_HW, and those of these samples of the anchor."""
    needed = wanted_HW.flatten().clone()
    needed[samples_N] = True
    width = wanted_HW.shape[1]
    for owner in range(len(bands)):
        first, end = (bands.starts[at] * width for at in (owner, owner + 1))
        yield first + needed[first:end].nonzero()[:, 0]
