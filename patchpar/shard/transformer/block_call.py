"""The state of a call of a block whose tokens are split, and of the tensors it returned."""

from torch import Tensor

from patchpar.shard.transformer.token_plan import BlockPlan, Replicated, TokenRows
from patchpar.shard.transformer.token_ranges import TokenRanges


class BlockCall:
    """A running call of a block on this rank's tokens, `ranges`."""

    def __init__(self, path: str, plan: BlockPlan) -> None:
        self.path, self.plan = path, plan
        self.ranges = TokenRanges(group_rank=0, starts=(0,))
        self.attentions = self.sums = self.convolutions = 0
        self.part: str | None = None  # the running part that every rank computes with all tokens

    def part_at(self, path: str) -> Replicated | None:
        """Return the part at the full `path` that is computed with all tokens; None for any other."""
        return next((part for part in self.plan.replicated if f"{self.path}.{part.path}" == path), None)


class LocalTokens:
    """The state of a tensor that has this rank's tokens only; `whole` [B, L, C] or any other layout, once gathered."""

    def __init__(self, rows: TokenRows, block: BlockCall) -> None:
        self.rows, self.ranges, self.where = rows, block.ranges, block.path
        self.whole: Tensor | None = None
