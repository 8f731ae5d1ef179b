"""Which positions of a window another window attends to beyond its own border. Pure geometry.

    window 0        | window 1           positions of window 1 that window 0 attends to, with a reach of two:
    . . . . . . . . | x x . . . . . .    those nearer to its border than that, each of one window only

Where windows overlap, a position belongs to the nearer window: cores meet half way, so that no position counts twice.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from patchpar.strategies.structure.windows import Windows


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
