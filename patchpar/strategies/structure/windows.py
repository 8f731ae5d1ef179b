"""Overlapping windows of native size over a large latent, and the weights that blend their predictions.

    starts along a side, window 8, overlap one half      0       4       8      12
                                                         |-------|       |-------|
                                                             |-------|
    weights are raised cosines, divided by their sum: 1 everywhere, and no window ends in a step

Inner windows are shifted in every step, so that their borders leave no visible seam (DemoFusion, arXiv:2311.16973).
The shift is a function of the seed and the step: all ranks compute the same windows without communication.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.strategies.structure.sizing import fewest_of, starts_of

Zone = tuple[tuple[int, int], tuple[int, int]]
"""(first row, end row), (first column, end column)."""


@dataclass(frozen=True)
class Windows:
    """`corners` (top, left) of windows of `window` (h, w) over a latent of `size` (H, W)."""

    size: tuple[int, int]
    window: tuple[int, int]
    corners: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.corners)

    def cut(self, x_BCHW: Tensor, number: int) -> Tensor:
        """Return window `number` of a latent as a view: [B, C, h, w]."""
        (top, left), (height, width) = self.corners[number], self.window
        return x_BCHW[..., top : top + height, left : left + width]

    @cached_property
    def _bump_hw(self) -> Tensor:
        return _bump(self.window[0])[:, None] * _bump(self.window[1])

    @cached_property
    def _total_HW(self) -> Tensor:
        total = torch.zeros(self.size, dtype=torch.float64)
        for number in range(len(self)):
            self.cut(total, number).add_(self._bump_hw)
        return total

    def weight(self, number: int) -> Tensor:
        """Return the blending weights of a window, [h, w]; at each position the weights of all windows add up to 1."""
        return (self._bump_hw / self.cut(self._total_HW, number)).float()

    def columns(self, numbers: list[int]) -> slice:
        """Return the columns that these windows span."""
        lefts = [self.corners[number][1] for number in numbers]
        return slice(min(lefts), max(lefts) + self.window[1])


def _bump(count: int) -> Tensor:
    """Return sin² at `count` samples, [count], nowhere zero."""
    return torch.sin(math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How windows are placed. `overlap`: the least fraction that neighbours share; `moved`: shifted in every step.

    With a `margin` there are as few windows as without overlap, each larger by that fraction of its size.
    """

    overlap: float = 0.5
    margin: float | None = None
    moved: bool = True

    def lay(self, size: tuple[int, int], native: tuple[int, int], *, key: str, unit: int = 1, step: int = 1) -> Windows:
        """Return windows of native size, or of the whole side where that is less; `key` seeds the shift of inner ones.

        Corners are multiples of `unit`, sizes of `step` except a whole side. Raises PlanError for sides that are not
        multiples of `unit`.
        """
        window, (tops, lefts) = self._grid(size, native, unit, step)
        rng = random.Random(key)

        def moved(start: int, dim: int) -> int:
            low, reach, high = self._range(start, size[dim], window[dim], unit)
            return min(max(start + rng.randint(-reach, reach) * unit, low), high) if reach else start

        corners = tuple((moved(top, 0), moved(left, 1)) for top in tops for left in lefts)
        return Windows(size, window, corners)

    def zones(
        self, size: tuple[int, int], native: tuple[int, int], *, unit: int = 1, step: int = 1
    ) -> tuple[Zone, ...]:
        """Return the zone that each window of `lay` stays within for any key. Raises PlanError as `lay` does."""
        window, starts = self._grid(size, native, unit, step)

        def patch_span(start: int, dim: int) -> tuple[int, int]:
            low, _, high = self._range(start, size[dim], window[dim], unit)
            return low, high + window[dim]

        return tuple((patch_span(top, 0), patch_span(left, 1)) for top in starts[0] for left in starts[1])

    def _grid(
        self, size: tuple[int, int], native: tuple[int, int], unit: int, step: int
    ) -> tuple[tuple[int, int], tuple[list[int], list[int]]]:
        """Return the size of windows and their first rows and columns before the shift. Raises PlanError."""
        for side in size:
            if side % unit:
                raise PlanError(f"a latent of {size[0]} x {size[1]} has a side that is no multiple of {unit}")
        (height, tops), (width, lefts) = (
            self._laid(side, own, unit, step) for side, own in zip(size, native, strict=True)
        )
        return (height, width), (tops, lefts)

    def _laid(self, side: int, native: int, unit: int, step: int) -> tuple[int, list[int]]:
        """Return the size of windows along a side and their first positions."""
        if self.margin is not None:
            return fewest_of(side, native, self.margin, unit, step)
        return min(side, native), starts_of(side, min(side, native), self.overlap, unit)

    def _range(self, start: int, side: int, window: int, unit: int) -> tuple[int, int, int]:
        """Return (the first position, the reach in units, the last position) of a window's shift.

        The shift is at most a quarter of the overlap, so that neighbours still overlap, and stays within the latent.
        """
        room = side - window
        fixed = not self.moved or self.margin is not None or start in (0, room)
        reach = 0 if fixed else int(window * self.overlap / 4) // unit
        return max(start - reach * unit, 0), reach, min(start + reach * unit, room)


@dataclass(frozen=True)
class WindowNeighbours:
    """Windows in rows and columns, and how far in latents (down, across) they attend to others: `reach`."""

    windows: Windows
    reach: tuple[int, int]

    @cached_property
    def _cores(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """The core (first, end) of the windows by their first position, downwards and across."""
        found = []
        for dim in range(2):
            starts = sorted({corner[dim] for corner in self.windows.corners})
            window, side = self.windows.window[dim], self.windows.size[dim]
            borders = [(before + window + after) // 2 for before, after in pairwise(starts)]
            found.append(dict(zip(starts, pairwise([0, *borders, side]), strict=True)))
        return tuple(found)

    def tokens(self, stride: int) -> tuple[int, int]:
        """Return the rows and columns of a window's tokens, each of `stride` x `stride` latents."""
        height, width = (-(-side // stride) for side in self.windows.window)
        return height, width

    def seen(self, sender: int, receiver: int, stride: int) -> Tensor:
        """Return the indices of the sender's tokens, row by row, that the receiver attends to: int64, [count]."""
        kept, inside = [], []
        for dim, count in enumerate(self.tokens(stride)):
            start, other = self.windows.corners[sender][dim], self.windows.corners[receiver][dim]
            positions = start + stride * torch.arange(count) + (stride - 1) / 2
            low, high = self._cores[dim][start]
            end, reach = other + self.windows.window[dim], self.reach[dim]
            core = (positions >= low) & (positions < high)
            kept.append(core & (positions >= other - reach) & (positions < end + reach))
            inside.append((positions >= other) & (positions < end))
        taken = (kept[0][:, None] & kept[1]) & ~(inside[0][:, None] & inside[1])
        return taken.flatten().nonzero()[:, 0]
