"""Which keys and values of another place a rank attends to when they are one step old: pure arithmetic, no torch.

A place's tokens are a grid: rows along the split, and whatever lies across it. What one place sends to another is a
list of pieces, each a range of its rows, as they are or averaged in windows. Of a video the rows along the split are
rows of every frame, or whole frames. The pieces:

    everything        every place                 all rows
    near band         the two neighbours          the rows nearest to the receiver; nothing from farther places
    band and pooled   the two neighbours          the nearest rows as they are, their other rows averaged
                      farther places              all rows averaged
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol


class TokensAcross(NamedTuple):
    """What lies across the split: rows of `columns` tokens, the same ones in each of `planes`.

    With `rows` what is split is the planes, of `rows` x `columns` tokens each. No window reaches from plane to plane.
    """

    columns: int
    planes: int = 1
    rows: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens for each row along the split."""
        return self.columns * self.planes * (self.rows or 1)

    def volume(self, rows: int) -> tuple[int, int, int]:
        """Planes, their rows and their columns, of so many rows along the split."""
        return (self.planes, rows, self.columns) if self.rows is None else (rows, self.rows, self.columns)


class PooledRows(NamedTuple):
    """Rows `start` to `stop` of a place's grid, averaged in windows of `pool` x `pool` tokens; 1 leaves them."""

    start: int
    stop: int
    pool: int = 1

    def windows(self, across: TokensAcross) -> tuple[int, int, int]:
        """How many planes, and windows along the rows and columns of each."""
        planes, rows, columns = across.volume(self.stop - self.start)
        return planes, -(-rows // self.pool), -(-columns // self.pool)

    def num_tokens(self, across: TokensAcross) -> int:
        """How many tokens it makes."""
        return math.prod(self.windows(across))

    def weights(self, across: TokensAcross) -> Iterator[int]:
        """How many tokens each of its tokens stands for; windows at the end may be smaller."""
        planes, rows, columns = across.volume(self.stop - self.start)
        heights, widths = ([min(self.pool, size - at) for at in range(0, size, self.pool)] for size in (rows, columns))
        for _, height, width in product(range(planes), heights, widths):
            yield height * width


class KVSelection(Protocol):
    """What goes from one place to another."""

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[PooledRows, ...]:
        """Pieces of the sender's `rows` rows that the receiver is sent."""


@dataclass(frozen=True, slots=True)
class AllRows:
    """All rows of every place."""

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[PooledRows, ...]:
        """All rows."""
        return (PooledRows(0, rows),)


@dataclass(frozen=True, slots=True)
class NearRows:
    """A share of the rows of each neighbour."""

    fraction: float

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[PooledRows, ...]:
        """The rows next to the receiver, at least one."""
        if abs(sender - receiver) != 1:
            return ()
        return (_nearest(sender, receiver, rows, self.fraction),)


@dataclass(frozen=True, slots=True)
class NearRowsAndPooled:
    """A share of the rows of each neighbour as they are, and all other rows of everybody averaged."""

    band: float
    pool: int

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[PooledRows, ...]:
        """The rows next to the receiver first, then the averaged rest."""
        if abs(sender - receiver) != 1:
            return (PooledRows(0, rows, self.pool),)
        near = _nearest(sender, receiver, rows, self.band)
        rest = PooledRows(near.stop, rows, self.pool) if near.start == 0 else PooledRows(0, near.start, self.pool)
        return (near, rest) if rest.stop > rest.start else (near,)


def _nearest(sender: int, receiver: int, rows: int, fraction: float) -> PooledRows:
    count = min(rows, max(1, round(fraction * rows)))
    return PooledRows(rows - count, rows) if sender < receiver else PooledRows(0, count)
