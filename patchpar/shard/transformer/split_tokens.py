"""Where the split tokens are among the queries or keys of an attention call, and masks cut and reordered to match.

local, [common] own [common] own [common]       own tokens of each run, such as text and an image
whole, [common] all [common] all [common]       in this order, of which masks are
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.stale.token_slots import TokenSlots
from patchpar.shard.transformer.token_plan import AttentionTokens
from patchpar.shard.transformer.token_ranges import TokenRanges
from patchpar.shard.transformer.token_runs import Runs, TokenRun, runs_of

T = TypeVar("T")


class PlacedRun(NamedTuple):
    """A run of split tokens of which ours begin at index `start` among the local ones."""

    start: int
    ranges: TokenRanges


@dataclass(frozen=True)
class SplitTokens:
    """Queries or keys of a call: `local` on this rank, among them its tokens of each run, in the order of their starts.

    The others are common tokens, which every rank has. What it says of them is computed once.
    """

    local: int
    runs: tuple[PlacedRun, ...] = ()

    @classmethod
    def of(cls, size: int, runs: Iterable[TokenRun]) -> "SplitTokens":
        """Return them for a dim of `size` rows of this rank. Raises UnsupportedModel."""
        placed = [PlacedRun(rows.start(size, ranges.count), ranges) for rows, ranges in runs]
        found = cls(size, tuple(sorted(placed, key=lambda run: (run.start, run.ranges.count))))  # empty ones first
        if min(found._gaps) < 0:
            raise UnsupportedModel(f"two runs of split tokens overlap in {size} rows, which they did not in the search")
        return found

    @cached_property
    def own(self) -> int:
        """Split tokens of this rank."""
        return sum(ranges.count for _, ranges in self.runs)

    @cached_property
    def tokens(self) -> int:
        """Split tokens of all ranks."""
        return sum(ranges.num_tokens for _, ranges in self.runs)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Split tokens of each rank."""
        return tuple(map(sum, zip(*(ranges.sizes for _, ranges in self.runs), strict=True)))

    @cached_property
    def whole(self) -> int:
        """All tokens of the call on one device."""
        return self.local - self.own + self.tokens

    @cached_property
    def common(self) -> int:
        """Tokens that every rank has."""
        return self.local - self.own

    @cached_property
    def _gaps(self) -> list[int]:
        """Common tokens before each run, and after the last."""
        ends = [0, *(start + ranges.count for start, ranges in self.runs)]
        return [start - end for start, end in zip([*(start for start, _ in self.runs), self.local], ends, strict=True)]

    def parted(self, x: Tensor, dim: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the common tokens around the runs, and our own of each, of x with the local tokens along `dim`.

        Tensors of any shape.
        """
        return self._parted(x, dim, [ranges.count for _, ranges in self.runs])

    def _parted(self, x: Tensor, dim: int, counts: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        pieces = x.split_with_sizes(_interleaved(self._gaps, counts), dim)
        return list(pieces[::2]), list(pieces[1::2])

    def _whole_parted(self, x: Tensor, dim: int) -> tuple[list[Tensor], list[Tensor]]:
        return self._parted(x, dim, [ranges.num_tokens for _, ranges in self.runs])

    def joined(self, common: Sequence[Tensor], tokens: Sequence[Tensor], dim: int) -> Tensor:
        """Return common tokens and those of each run, tensors of any shape, in their order along `dim`."""
        return torch.cat(_interleaved(common, tokens), dim)

    def cut(self, mask: Tensor, dim: int) -> Tensor:
        """Cut a mask, of any shape that is whole along `dim`, to the tokens of this rank."""
        if mask.ndim < -dim or mask.shape[dim] in (1, self.local) or self.own == self.tokens:
            return mask
        common, tokens = self._whole_parted(mask, dim)
        return self.joined(common, [run.ranges.own(x, dim) for run, x in zip(self.runs, tokens, strict=True)], dim)

    def rows(self, mask: Tensor | None) -> Tensor | None:
        """Cut a mask, of any shape, to the rows of these queries."""
        return None if mask is None else self.cut(mask, -2)

    @cached_property
    def is_common_first(self) -> bool:
        """Whether all common tokens are before the split ones."""
        return not any(self._gaps[1:])

    def common_first(self, x: Tensor, dim: int) -> Tensor:
        """Reorder x, of any shape with the local tokens along `dim`: common tokens first, then our own."""
        if self.is_common_first:
            return x
        common, own = self.parted(x, dim)
        return torch.cat([*common, *own], dim)

    def by_rank(self, mask: Tensor, dim: int) -> Tensor:
        """Reorder a mask of any shape that is whole along `dim`: common tokens first, then each rank's tokens."""
        if self.is_common_first and (not self.runs or (len(self.runs) == 1 and self.runs[0].ranges.in_order)):
            return mask
        common, tokens = self._whole_parted(mask, dim)
        parts = [run.ranges.parts(x, dim) for run, x in zip(self.runs, tokens, strict=True)]
        return torch.cat([*common, *chain.from_iterable(zip(*parts, strict=True))], dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Undo `common_first` for `x` of any shape."""
        if self.is_common_first:
            return x
        gaps, counts = self._gaps, [ranges.count for _, ranges in self.runs]
        pieces = x.split_with_sizes([*gaps, *counts], dim)
        return self.joined(pieces[: len(gaps)], pieces[len(gaps) :], dim)


class TextKeys(NamedTuple):
    """Keys with a text that is split, of which all tokens are to be of this step, while those of the image are not.

    `text`: where our text is among them. `here`: the same keys, with our text as common tokens. `whole`: keys with all
    of the text, which is common. `slots`: tokens of the text on each rank. `is_alone`: whether no other tokens are
    common.
    """

    text: SplitTokens
    here: SplitTokens
    whole: SplitTokens
    slots: TokenSlots
    is_alone: bool

    @classmethod
    def of(cls, size: int, runs: Runs) -> "TextKeys | None":
        """Return them for so many keys of this rank with `runs` of an image and a text; None without either."""
        if len(runs) != 2:
            return None
        here, text = SplitTokens.of(size, runs[:1]), SplitTokens.of(size, runs[1:])
        (image,), ((start, ranges),) = here.runs, text.runs
        more = text.tokens - text.own
        placed = image._replace(start=image.start + more) if start < image.start else image
        whole = SplitTokens(size + more, (placed,))
        return cls(text, here, whole, TokenSlots(ranges.sizes), is_alone=here.common == text.own)


class PlacedCall(NamedTuple):
    """Where split tokens are among the queries and keys of a call: one object where they are the same tokens.

    `first`: the first run of keys, if any. `text`: of keys with a second run.
    """

    queries: SplitTokens
    keys: SplitTokens
    first: Runs
    text: TextKeys | None


class CallRuns:
    """Where each run of tokens is in an attention call, with the ranges of the run: the same in every step."""

    def __init__(self, runs: Sequence[tuple[AttentionTokens, TokenRanges]]) -> None:
        self.runs = tuple(runs)
        self._placed: dict[tuple[int, int], PlacedCall] = {}

    @cached_property
    def rows(self) -> LevelGrid:
        """The first run as a grid of rows that are split."""
        return self.runs[0][1].rows

    def placed(self, queries: int, keys: int) -> PlacedCall:
        """Return where they are among so many local queries and keys. Raises UnsupportedModel."""
        found = self._placed.get((queries, keys))
        if found is None:
            of_keys = runs_of((tokens.keys, ranges) for tokens, ranges in self.runs)
            of_queries = runs_of((tokens.queries, ranges) for tokens, ranges in self.runs)
            own, others = SplitTokens.of(queries, of_queries), SplitTokens.of(keys, of_keys)
            text = TextKeys.of(keys, of_keys)
            found = PlacedCall(own, own if own == others else others, of_keys[:1], text)
            self._placed[queries, keys] = found
        return found


def _interleaved(common: Sequence[T], tokens: Sequence[T]) -> list[T]:
    """Return the common parts, of which there is one more, with those of runs between them."""
    return [common[0], *chain.from_iterable(zip(tokens, common[1:], strict=True))]
