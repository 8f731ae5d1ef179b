"""Which rows of a latent, and of its prediction, belong to each piece of the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.latent import is_latent
from patchpar.shard.transformer.token_plan import GridSource, TokenPlan
from patchpar.shard.transformer.token_ranges import Cut, TokenRanges


@dataclass(frozen=True, slots=True)
class LatentBands:
    """Bands along `dim` of a latent, counted from the right: one of each of the `sizes` for each piece."""

    dim: int
    sizes: tuple[int, ...]

    def of(self, x: Tensor, piece: int) -> Tensor:
        """Return the band of a piece, a view of x, of any shape."""
        return x.narrow(self.dim, sum(self.sizes[:piece]), self.sizes[piece])

    def cuts(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape has all bands."""
        return len(shape) >= -self.dim and shape[self.dim] == sum(self.sizes)

    def alone(self, arguments: CallArguments, latent: str, piece: int) -> CallArguments:
        """Return the call with NaN in the latent but for the band of a piece."""

        def change(name: str, leaf: Any) -> Any:
            if not is_latent(name, latent) or not isinstance(leaf, Tensor):
                return leaf
            found = torch.full_like(leaf, torch.nan)
            self.of(found, piece).copy_(self.of(leaf, piece))
            return found

        return arguments.map(change)


def cut_for_bands(plan: TokenPlan | None) -> Cut:
    """Return the unit of pieces with which they are bands: whole rows of an image that is a latent with rows."""
    sources = [block.origin for block in plan.blocks] if plan is not None else []
    return "rows" if any(source is not None and source.dims for source in sources) else "runs"


def bands_of(plan: TokenPlan, ranges: Sequence[TokenRanges], arguments: CallArguments) -> LatentBands | None:
    """Return the bands of the pieces with these `ranges`, one for each list of blocks; None where there are none.

    What is returned may be wrong, and is to be checked.
    """
    latent = arguments.tensors().get(plan.latent)
    if latent is None or not latent.is_floating_point() or len(set(ranges)) != 1:
        return None
    (first, *_), source = ranges, plan.blocks[0].origin
    if latent.ndim == 3 and latent.shape[1] == first.num_tokens and first.in_order:
        return LatentBands(-2, first.sizes)
    found = None if source is None else _rows(source, first)
    return found if found is not None and found.cuts(latent.shape) else None


def _rows(source: GridSource, ranges: TokenRanges) -> LatentBands | None:
    """Return bands of whole rows or frames."""
    if ranges.grid is None or not source.dims or ranges.across.columns != ranges.grid.columns:
        return None
    index = -2 if ranges.across.rows is None else -3
    if len(source.dims) < -index:
        return None
    sizes = [(stop - start) * source.patches[index] for start, stop in pairwise(ranges.starts)]
    return LatentBands(source.dims[index], tuple(sizes))
