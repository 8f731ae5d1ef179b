"""Where the tokens of each rank lie in a buffer of tokens, in the order of group ranks.

Buffers of keys and values are [tokens, 2, B, N, D]: a rank's keys and values are contiguous, so that its message is a
view of the buffer, and attention reads keys and values as views with one stride from token to token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

from torch import Tensor


class EqualSlots(NamedTuple):
    """Consecutive ranks, from group rank `first`, with `tokens` each: they are handled in one operation."""

    first: int
    ranks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """`counts`: tokens of every group rank in the buffer. `common`: tokens before those, which all ranks have.

    `total`: tokens of the buffer. `starts`: first token of every group rank in it. `are_equal`: whether all ranks have
    the same number of tokens.
    """

    counts: tuple[int, ...]
    common: int = 0
    total: int = field(init=False, compare=False, repr=False)
    starts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    are_equal: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute what every attention asks for, once."""
        object.__setattr__(self, "total", self.common + sum(self.counts))
        object.__setattr__(self, "starts", tuple(accumulate(self.counts[:-1], initial=self.common)))
        object.__setattr__(self, "are_equal", len(set(self.counts)) == 1)

    def of(self, buffer: Tensor, group_rank: int) -> Tensor:
        """Return the tokens [l, ...] of a rank, a view of the buffer [tokens, ...]."""
        return buffer.narrow(0, self.starts[group_rank], self.counts[group_rank])

    def without(self, group_rank: int) -> "TokenSlots":
        """Return the slots of a buffer without the tokens of that rank and without common ones."""
        return TokenSlots(tuple(0 if p == group_rank else count for p, count in enumerate(self.counts)))

    def others(self, group_rank: int) -> Iterator[EqualSlots]:
        """Yield all ranks with tokens but that one, joined where they are neighbours with the same number of tokens."""
        with_tokens = [(p, count) for p, count in enumerate(self.counts) if count and p != group_rank]
        for (_, tokens), run in groupby(with_tokens, key=lambda each: (each[0] > group_rank, each[1])):
            ranks = [p for p, _ in run]
            if ranks[-1] - ranks[0] == len(ranks) - 1:
                yield EqualSlots(ranks[0], len(ranks), tokens)
            else:  # ranks without tokens lie between
                yield from (EqualSlots(p, 1, tokens) for p in ranks)
