"""Where the split tokens are among the queries or keys of an attention call, and masks cut and reordered to match."""

from dataclasses import dataclass

import torch
from torch import Tensor

from patchpar.shard.transformer.token_plan import TokenRows
from patchpar.shard.transformer.token_ranges import TokenRanges


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """Queries or keys of a call: `local` on this rank, `own` of them its tokens, from `start` on; `whole` in all.

    The others are common tokens, which every rank has.
    """

    start: int
    local: int
    ranges: TokenRanges

    @classmethod
    def of(cls, rows: TokenRows | None, x: Tensor, ranges: TokenRanges) -> "SplitTokens":
        """Return them for x [..., local, D] of this rank; `rows` None: all of them are common."""
        size = x.shape[-2]
        if rows is None:
            return cls(size, size, TokenRanges(group_rank=0, starts=(0, 0)))
        return cls(rows.start(size, ranges.count), size, ranges)

    @property
    def own(self) -> int:
        """Split tokens of this rank."""
        return self.ranges.count

    @property
    def tokens(self) -> int:
        """Split tokens of all ranks."""
        return self.ranges.num_tokens

    @property
    def whole(self) -> int:
        """All tokens of the call on one device."""
        return self.local - self.own + self.tokens

    @property
    def after(self) -> int:
        """Common tokens after the split ones."""
        return self.local - self.own - self.start

    def cut(self, mask: Tensor, dim: int) -> Tensor:
        """Cut a mask, of any shape that is whole along `dim`, to the tokens of this rank."""
        if mask.ndim < -dim or mask.shape[dim] in (1, self.local) or self.own == self.tokens:
            return mask
        before, tokens, after = mask.split_with_sizes((self.start, self.tokens, self.after), dim)
        return torch.cat([before, self.ranges.own(tokens, dim), after], dim)

    def rows(self, mask: Tensor | None) -> Tensor | None:
        """Cut a mask, of any shape, to the rows of these queries."""
        return None if mask is None else self.cut(mask, -2)

    def common_first(self, x: Tensor, dim: int) -> Tensor:
        """Reorder x, of any shape with the local tokens along `dim`: common tokens first, then our own."""
        if not self.after:
            return x
        before, own, after = x.split_with_sizes([self.start, self.own, self.after], dim)
        return torch.cat([before, after, own], dim)

    def by_rank(self, mask: Tensor, dim: int) -> Tensor:
        """Reorder a mask of any shape that is whole along `dim`: common tokens first, then each rank's tokens."""
        if not self.after and self.ranges.across.planes == 1:
            return mask
        before, tokens, after = mask.split_with_sizes([self.start, self.tokens, self.after], dim)
        return torch.cat([before, after, self.ranges.by_rank(tokens, dim)], dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Undo `common_first` for `x` of any shape."""
        if not self.after:
            return x
        before, after, own = x.split_with_sizes([self.start, self.after, self.own], dim)
        return torch.cat([before, own, after], dim)
