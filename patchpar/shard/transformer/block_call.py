"""What is known of a block whose tokens are split, while it runs, and of what it returned."""

from torch import Tensor

from patchpar.shard.transformer.token_plan import BlockPlan, Replicated, TokenRows
from patchpar.shard.transformer.token_ranges import TokenRanges


class BlockCall:
    """A block at work on `tokens` of which we have our share."""

    def __init__(self, path: str, plan: BlockPlan) -> None:
        self.path, self.plan = path, plan
        self.ranges = TokenRanges(group_rank=0, starts=(0,))
        self.attentions = self.sums = self.convolutions = 0
        self.part: str | None = None  # that is being computed with all tokens

    def part_at(self, path: str) -> Replicated | None:
        """The part of that whole path that is computed with all tokens; None for any other."""
        return next((part for part in self.plan.replicated if f"{self.path}.{part.path}" == path), None)


class LocalTokens:
    """What is known of a tensor of which we have our tokens only; `whole` once somebody has looked."""

    def __init__(self, rows: TokenRows, block: BlockCall) -> None:
        self.rows, self.ranges, self.where = rows, block.ranges, block.path
        self.whole: Tensor | None = None
