"""The state of a call of a block whose tokens are split."""

from patchpar.shard.transformer.token_plan import BlockPlan, Replicated
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

    def watches(self, path: str) -> bool:
        """Whether the functions of the module at the full `path` are intercepted."""
        return any(path == (f"{self.path}.{part}" if part else self.path) for part in self.plan.watched)
