"""Which of a block's tokens each rank has: a run of them, or a band of the grid that they lie in.

2 frames of 4 rows, 2 ranks         fewer frames than rows: rows of every frame

along rows      0 0 1 1 | 0 0 1 1
in runs         0 0 0 0 | 1 1 1 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from patchpar.plan.bands import Bands, starts_of
from patchpar.plan.kv_selection import TokensAcross
from patchpar.shard.stale.token_grid import LevelGrid

Cut = Literal["runs", "bands", "rows"]
"""Runs of tokens; bands across a video's frames where it has more rows than frames, with equally many tokens each; or
bands of whole rows or whole frames."""


TOKEN = TokensAcross(1)


class TokenGrid(NamedTuple):
    """Frames, rows and columns of tokens, in this order: the tokens of a row follow each other."""

    frames: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self.frames * self.rows * self.columns

    @property
    def along(self) -> str:
        """The axis with the larger size, "frames" or "rows"."""
        return "frames" if self.frames >= self.rows else "rows"

    def __str__(self) -> str:
        image = f"{self.rows} rows x {self.columns} columns"
        return f"{self.frames} frames x {image}, frame-major" if self.frames > 1 else image


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRanges:
    """Rows `starts[i]` to `starts[i + 1]` are those of rank i; `across` is the layout of a row and its planes.

    In a run every token is a row. `group_rank` is this rank. `grid`: None where it is not known. `num_tokens`: of all
    ranks, `sizes` of each and `count` of this one.
    """

    group_rank: int
    starts: tuple[int, ...]
    across: TokensAcross = TOKEN
    grid: TokenGrid | None = None
    num_tokens: int = field(init=False, compare=False, repr=False)
    sizes: tuple[int, ...] = field(init=False, compare=False, repr=False)
    count: int = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute what every layer asks for, once."""
        tokens = self.across.num_tokens
        sizes = tuple((stop - start) * tokens for start, stop in pairwise(self.starts))
        for name, value in (("num_tokens", self.starts[-1] * tokens), ("sizes", sizes)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "count", sizes[self.group_rank] if sizes else 0)
        object.__setattr__(self, "_hash", hash((self.group_rank, self.starts, self.across, self.grid)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def num_rows(self) -> int:
        """The number of rows of this rank along the split."""
        return self.starts[self.group_rank + 1] - self.starts[self.group_rank]

    def before(self, number: int) -> int:
        """Return how many of our tokens are among the first `number` of all; they are our first ones."""
        in_plane = self.num_tokens // self.across.planes
        planes, rest = divmod(number, in_plane)
        start, own = (sum(sizes) // self.across.planes for sizes in (self.sizes[: self.group_rank], (self.count,)))
        return planes * own + min(max(rest - start, 0), own)

    @property
    def rows(self) -> LevelGrid:
        """The same as a grid of rows that are split, each rank's tokens together."""
        return _grid_of_rows(self.starts, self.across)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return our tokens of x, a tensor of any shape with all tokens along `dim`, in their order."""
        return self.parts(x, dim)[self.group_rank]

    @property
    def in_order(self) -> bool:
        """Whether the tokens rank by rank are those of the whole in their order."""
        return self.across.planes == 1

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return all tokens along `dim` in their order, from the parts of all ranks, of any shape."""
        dim %= parts[0].ndim
        if self.across.planes == 1:
            return torch.cat(list(parts), dim)
        planes = [torch.unflatten(part, dim, (self.across.planes, -1)) for part in parts]
        return torch.cat(planes, dim + 1).flatten(dim, dim + 1)

    def parts(self, x: Tensor, dim: int) -> list[Tensor]:
        """Return the tokens of each rank of x, a tensor of any shape with all tokens along `dim`."""
        dim %= x.ndim
        if self.across.planes == 1:
            return list(x.split_with_sizes(self.sizes, dim))
        in_plane = [size // self.across.planes for size in self.sizes]
        planes = torch.unflatten(x, dim, (self.across.planes, -1)).split_with_sizes(in_plane, dim + 1)
        return [part.flatten(dim, dim + 1) for part in planes]

    def __str__(self) -> str:
        tokens = f"{self.num_tokens} tokens" + (f", {self.grid}" if self.grid else "")
        if self.across == TOKEN:
            return f"{tokens}; split in runs: {_listed(self.sizes)}"
        if self.across.columns == 1:
            return f"{tokens}; split along rows: {_listed(self.sizes)} tokens"
        what = "frames" if self.across.rows else "rows"
        return f"{tokens}; split along {what}: {_listed(tuple(b - a for a, b in pairwise(self.starts)))}"


@lru_cache(maxsize=1024)  # every attention to stale keys asks, in every call
def _grid_of_rows(starts: tuple[int, ...], across: TokensAcross) -> LevelGrid:
    return LevelGrid(Bands(starts), across, dim=-2)


def _listed(counts: Sequence[int]) -> str:
    return f"{len(counts)} x {counts[0]}" if len(set(counts)) == 1 else ", ".join(map(str, counts))


@lru_cache(maxsize=1024)  # every block asks, in every call
def spread(
    tokens: int,
    group_rank: int,
    group_ranks: int,
    *,
    grid: TokenGrid | None = None,
    cut: Cut = "runs",
    ratio: tuple[int, ...] = (),
) -> TokenRanges:
    """Split `tokens` between ranks, as evenly as the unit allows; in runs where there are fewer units than ranks.

    With a `ratio`, in proportion to it.

    Whole rows or whole frames form bands along the larger of the two.
    """
    grid = grid if grid is not None and grid.num_tokens == tokens else None
    rows, across = tokens, TOKEN
    if grid is not None and cut == "rows":
        rows = max(grid.frames, grid.rows)
        frames = TokensAcross(grid.columns, rows=grid.rows)
        across = frames if grid.along == "frames" else TokensAcross(grid.columns, planes=grid.frames)
    elif grid is not None and cut == "bands" and grid.along == "rows":
        rows, across = grid.rows * grid.columns, TokensAcross(1, planes=grid.frames)
    if rows < group_ranks:
        rows, across = tokens, TOKEN
    starts = starts_of(rows, group_ranks, ratio)
    return TokenRanges(group_rank=group_rank, starts=starts, across=across, grid=grid)
