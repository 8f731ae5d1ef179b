"""The tokens of an image in pieces on one rank: keys and values of other pieces come from memory, not from messages.

The counterpart of `TokenSplit`, whose tokens are on several ranks: the axis is one of pieces, and its group rank the
piece that is computed now. In an exact step there is one piece, all tokens, whose keys and values are remembered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.exchange_policy import StaleKV
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.token_buffer import attend_to_tokens
from patchpar.shard.local_patch import without_values
from patchpar.shard.piped.piece_memory import PieceMemory, RememberedParts
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.stale.cache import StaleCache
from patchpar.shard.stale.guidance_call import StaleEntry
from patchpar.shard.stale.token_slots import TokenSlots
from patchpar.shard.transformer.attention import TokenSplit, common_first
from patchpar.shard.transformer.split_tokens import PlacedRun, SplitTokens
from patchpar.shard.transformer.token_ranges import TokenRanges, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRanges(TokenRanges):
    """The ranges of tokens that are all of the first piece: text, which is computed once in a step."""

    @classmethod
    def of(cls, tokens: int, piece: int, pieces: int) -> "TextRanges":
        """Return the ranges of so many tokens, seen from a piece."""
        return cls(group_rank=piece, starts=(0, *[tokens] * pieces))


def piece_axis(piece: int, pieces: int) -> Axis:
    """Return the axis of pieces, seen from one of them. Its ranks are no ranks of a job."""
    return Axis("piece", piece, pieces, tuple(range(pieces)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSplit(TokenSplit):
    """How tokens are computed in `pieces`; `axis` is that of the piece, or of a whole call, which has one piece.

    `text`: whether a second run of tokens, such as text, is computed with the first piece only; else with each. `mode`
    None: every piece attends to its own tokens alone, wrong on purpose.
    """

    pieces: int

    @property
    def _cache(self) -> StaleCache:
        assert self.patch is not None
        assert self.patch.cache is not None
        return self.patch.cache

    @property
    def _is_whole(self) -> bool:
        return self.axis.size == 1

    def text_ranges(self, tokens: int) -> TokenRanges | None:
        """Return the ranges of a second run of so many tokens; None where every piece computes all of it."""
        return TextRanges.of(tokens, self.axis.rank, self.axis.size) if self.text and tokens else None

    def attend_remembered(
        self, where: str, keys: SplitTokens, queries: SplitTokens, image: TokenRanges, call: AttentionCall
    ) -> Tensor | None:
        """Return the attention output [B, N, q, E] to the tokens of all pieces; None in the negative control.

        Raises UnsupportedModel.
        """
        if self._is_whole and call.attn_mask is not None:
            self._remember_mask(where, keys, call.attn_mask)
        if self.mode is None:
            return None
        entry = self._cache.entry(where)
        if self._is_whole:
            self._remember(where, entry, keys, image, call)
            return call.run()
        stale = common_first(where, call, queries, keys)
        key_BlND, value_BlND = (x.transpose(1, 2) for x in (stale.key, stale.value))
        assert self.patch is not None
        if entry.is_first:
            raise without_values(where)
        memory: PieceMemory = entry.state
        tokens = memory.write(self.axis.rank, key_BlND, value_BlND, self.patch.step_ratio)
        return queries.in_order(attend_to_tokens(stale, tokens, stale.attn_mask), 2)

    def _remember(
        self, where: str, entry: StaleEntry, keys: SplitTokens, image: TokenRanges, call: AttentionCall
    ) -> None:
        """Store keys and values of a whole call, piece by piece."""
        first = self._in_pieces(where, keys)
        if call.value.shape[-1] != call.key.shape[-1]:
            raise UnsupportedModel(f"{where}: values of another width than keys need strategy=exact")
        ordered = [first.by_rank(x, -2).transpose(1, 2) for x in (call.key, call.value)]
        slots = TokenSlots(first.sizes, first.common)
        if entry.state is None or entry.state.slots != slots:
            of_image = [self._image_in(piece, where, keys, image) for piece in range(self.pieces)]
            batch, heads, _, width = call.key.shape
            assert self.patch is not None
            options = self.patch.policy.context
            assert isinstance(options, StaleKV)
            token = (2, batch, heads, width)
            entry.state = PieceMemory(slots, of_image, token, options, call.key, self._cache.workspace)
        entry.state.remember(*ordered, continues=entry.continues)

    def _image_in(self, piece: int, where: str, keys: SplitTokens, image: TokenRanges) -> tuple[int, int]:
        """Return where the image's tokens begin among a piece's own, and how many they are."""
        start = 0
        for run in keys.runs:
            count = self.divided(where, run.ranges, piece).count
            if run.ranges is image:
                return start, count
            start += count
        return 0, start

    def _in_pieces(self, where: str, keys: SplitTokens) -> SplitTokens:
        """Return the tokens of a whole call as those of the first piece."""
        placed, gone = [], 0
        for start, ranges in keys.runs:
            divided = self.divided(where, ranges, 0)
            placed.append(PlacedRun(start - gone, divided))
            gone += ranges.count - divided.count
        return SplitTokens(keys.local - gone, tuple(placed))

    def divided(self, where: str, ranges: TokenRanges, piece: int) -> TokenRanges:
        """Return the ranges of all tokens in pieces. Raises PlanError."""
        if isinstance(ranges, TextRanges):
            return TextRanges.of(ranges.num_tokens, piece, self.pieces)
        tokens = ranges.num_tokens
        if tokens < self.pieces:
            raise PlanError(
                f"pieces={self.pieces}, but {where} has {tokens} tokens: use a larger image, or pieces={tokens} at most"
            )
        return spread(tokens, piece, self.pieces, grid=ranges.grid, cut=self.cut)

    def gather_together(self, tensors: Sequence[Tensor], dim: int, placed: SplitTokens, where: str) -> list[Tensor]:
        """Return each tensor, of any shape, with the tokens of all pieces along `dim`, as they were last known."""
        if not placed.runs:
            return list(tensors)
        parts = self._parts(where)
        if self._is_whole:
            for number, x in enumerate(tensors):
                self._remember_parts(parts, number, x, dim, placed, where)
            return list(tensors)
        found = []
        for number, x in enumerate(tensors):
            common, own = placed.parted(x, dim)
            parts.remember(number, self.axis.rank, own)
            by_run = zip(*(parts.of(number, piece) for piece in range(self.pieces)), strict=True)
            whole = [run.ranges.joined(each, dim) for run, each in zip(placed.runs, by_run, strict=True)]
            found.append(placed.joined(common, whole, dim))
        return found

    def _parts(self, where: str) -> RememberedParts:
        entry = self._cache.entry(f"{where}, joined")  # an attention may have a mask joined at the same point
        if entry.is_first and not self._is_whole:
            raise without_values(where)
        if entry.state is None:
            entry.state = RememberedParts(where)
        return entry.state

    def _remember_mask(self, where: str, keys: SplitTokens, mask: Tensor) -> None:
        """Store the columns of a mask by piece, for pieces that make one of their own columns only."""
        if mask.shape[-1] != keys.local:
            return
        if mask.ndim > 1 and mask.shape[-2] > 1:
            if mask.dtype != torch.bool:
                return
            mask = mask.any(-2, keepdim=True)
        self._remember_parts(self._parts(where), 0, mask, -1, keys, where)

    def _remember_parts(
        self, parts: RememberedParts, number: int, x: Tensor, dim: int, placed: SplitTokens, where: str
    ) -> None:
        _, tokens = placed.parted(x, dim)
        by_run = [
            self.divided(where, run.ranges, 0).parts(all_tokens, dim)
            for run, all_tokens in zip(placed.runs, tokens, strict=True)
        ]
        for piece, of_piece in enumerate(zip(*by_run, strict=True)):
            parts.remember(number, piece, of_piece)
