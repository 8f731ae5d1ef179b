"""Which keys and values of another place a rank attends to when they are one step old: pure arithmetic, no torch.

A place's tokens are a grid: rows along the split, and whatever lies across it. What one place sends to another is a
list of pieces, each a range of its rows, as they are or averaged in windows:

    everything        every place                 all rows
    near band         the two neighbours          the rows nearest to the receiver; nothing from farther places
    band and pooled   the two neighbours          the nearest rows as they are, their other rows averaged
                      farther places              all rows averaged
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """Rows `start` to `stop` of a place's grid, averaged in windows of `pool` x `pool` tokens; 1 leaves them."""

    start: int
    stop: int
    pool: int = 1

    def windows(self, across: int) -> tuple[int, int]:
        """How many windows of rows, and across."""
        return -(-(self.stop - self.start) // self.pool), -(-across // self.pool)

    def num_tokens(self, across: int) -> int:
        """How many tokens it makes."""
        return math.prod(self.windows(across))

    def weights(self, across: int) -> Iterator[int]:
        """How many tokens each of its tokens stands for; windows at the end may be smaller."""
        rows, columns = self.windows(across)
        for row in range(rows):
            height = min(self.pool, self.stop - self.start - row * self.pool)
            for column in range(columns):
                yield height * min(self.pool, across - column * self.pool)


class Selection(Protocol):
    """What goes from one place to another."""

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[Piece, ...]:
        """Pieces of the sender's `rows` rows that the receiver is sent."""


@dataclass(frozen=True, slots=True)
class Everything:
    """All rows of every place."""

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[Piece, ...]:
        """All rows."""
        return (Piece(0, rows),)


@dataclass(frozen=True, slots=True)
class NearBand:
    """A share of the rows of each neighbour."""

    fraction: float

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[Piece, ...]:
        """The rows next to the receiver, at least one."""
        if abs(sender - receiver) != 1:
            return ()
        return (_nearest(sender, receiver, rows, self.fraction),)


@dataclass(frozen=True, slots=True)
class BandAndPooled:
    """A share of the rows of each neighbour as they are, and all other rows of everybody averaged."""

    band: float
    pool: int

    def pieces(self, sender: int, receiver: int, rows: int) -> tuple[Piece, ...]:
        """The rows next to the receiver first, then the averaged rest."""
        if abs(sender - receiver) != 1:
            return (Piece(0, rows, self.pool),)
        near = _nearest(sender, receiver, rows, self.band)
        rest = Piece(near.stop, rows, self.pool) if near.start == 0 else Piece(0, near.start, self.pool)
        return (near, rest) if rest.stop > rest.start else (near,)


def _nearest(sender: int, receiver: int, rows: int, fraction: float) -> Piece:
    count = min(rows, max(1, round(fraction * rows)))
    return Piece(rows - count, rows) if sender < receiver else Piece(0, count)
