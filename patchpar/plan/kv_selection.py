"""Which stale keys and values of another rank a rank attends to: pure arithmetic, no torch.

A rank's tokens are a grid: rows along the split, and the other dims across it. What one rank sends to another is a list
of pieces, each a range of its rows, unchanged or averaged in windows. Of a video the rows along the split are rows of
every frame, or whole frames. The pieces:

    everything        every rank                  all rows
    near band         the two neighbours          the rows nearest to the receiver; nothing from farther ranks
    band and pooled   the two neighbours          the nearest rows unchanged, their other rows averaged
                      farther ranks               all rows averaged

The near band is PCPP's (arXiv:2412.02962); averages are ours: docs/partial-context.md, docs/decisions/0012.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol


class TokensAcross(NamedTuple):
    """Rows of `columns` tokens in each of `planes`; with `rows` planes are split. A window stays within a plane."""

    columns: int
    planes: int = 1
    rows: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens for each row along the split."""
        return self.columns * self.planes * (self.rows or 1)

    def volume(self, rows: int) -> tuple[int, int, int]:
        """Return (planes, rows, columns) of `rows` rows along the split."""
        return (self.planes, rows, self.columns) if self.rows is None else (rows, self.rows, self.columns)


class PooledRows(NamedTuple):
    """Rows `start` to `stop` of a rank's grid, averaged in windows of `pool` x `pool` tokens; 1 leaves them."""

    start: int
    stop: int
    pool: int = 1

    def windows(self, across: TokensAcross) -> tuple[int, int, int]:
        """Return (planes, windows along the rows, windows along the columns)."""
        planes, rows, columns = across.volume(self.stop - self.start)
        return planes, -(-rows // self.pool), -(-columns // self.pool)

    def num_tokens(self, across: TokensAcross) -> int:
        """Return the number of tokens of the piece."""
        return math.prod(self.windows(across))

    def weights(self, across: TokensAcross) -> Iterator[int]:
        """Yield how many tokens each pooled token averages; windows at the end may be smaller."""
        planes, rows, columns = across.volume(self.stop - self.start)
        heights, widths = ([min(self.pool, size - at) for at in range(0, size, self.pool)] for size in (rows, columns))
        for _, height, width in product(range(planes), heights, widths):
            yield height * width


class KVSelection(Protocol):
    """What one rank sends to another."""

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[PooledRows, ...]:
        """Return the pieces of the sender's `rows` rows for the receiver."""


@dataclass(frozen=True, slots=True)
class AllRows:
    """All rows of every rank."""

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[PooledRows, ...]:
        """Return all rows."""
        return (PooledRows(0, rows),)


@dataclass(frozen=True, slots=True)
class NearRows:
    """A fraction of the rows of each neighbour."""

    fraction: float

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[PooledRows, ...]:
        """Return the rows next to the receiver, at least one."""
        if abs(sender - receiver) != 1:
            return ()
        return (_nearest(sender, receiver, rows, self.fraction),)


@dataclass(frozen=True, slots=True)
class NearRowsAndPooled:
    """A fraction of the rows of each neighbour unchanged, and all other rows averaged."""

    band: float
    pool: int

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[PooledRows, ...]:
        """Return the rows next to the receiver first, then the averaged rest."""
        if abs(sender - receiver) != 1:
            return (PooledRows(0, rows, self.pool),)
        near = _nearest(sender, receiver, rows, self.band)
        rest = PooledRows(near.stop, rows, self.pool) if near.start == 0 else PooledRows(0, near.start, self.pool)
        return (near, rest) if rest.stop > rest.start else (near,)


def _nearest(sender: int, receiver: int, rows: int, fraction: float) -> PooledRows:
    count = min(rows, max(1, round(fraction * rows)))
    return PooledRows(rows - count, rows) if sender < receiver else PooledRows(0, count)
