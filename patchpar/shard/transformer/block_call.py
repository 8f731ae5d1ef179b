"""The state of a call of a block whose tokens are split."""

from patchpar.shard.transformer.block_arguments import ArgumentRule
from patchpar.shard.transformer.token_plan import AttentionTokens, BlockPlan, Replicated
from patchpar.shard.transformer.token_ranges import TokenRanges
from patchpar.shard.transformer.token_runs import Runs, runs_of


class BlockCall:
    """A running call of a block on this rank's tokens, `ranges`. `text`: of its text, if that is split too."""

    def __init__(self, path: str, plan: BlockPlan) -> None:
        self.path, self.plan = path, plan
        self.ranges = TokenRanges(group_rank=0, starts=(0,))
        self.text: TokenRanges | None = None
        self.attentions = self.sums = self.convolutions = 0
        self.part: str | None = None  # the running part that every rank computes with all tokens

    def input_runs(self, rule: ArgumentRule) -> dict[int, Runs]:
        """Return the runs of tokens in each argument that has some, by number."""
        first, text = dict(rule.inputs), dict(rule.text)
        numbers = first.keys() | text.keys()
        return {each: runs_of(((first.get(each), self.ranges), (text.get(each), self.text))) for each in numbers}

    def output_runs(self) -> dict[int, Runs]:
        """Return the runs of tokens in each output that has some, by number."""
        first, text = self.plan.outputs, {} if self.plan.text is None else self.plan.text.outputs
        numbers = first.keys() | text.keys()
        found = {each: runs_of(((first.get(each), self.ranges), (text.get(each), self.text))) for each in numbers}
        return {number: runs for number, runs in found.items() if runs}

    def attention_runs(self, number: int) -> list[tuple[AttentionTokens, TokenRanges]]:
        """Return where each run of tokens is in an attention call."""
        found = [(self.plan.attentions[number], self.ranges)]
        if self.plan.text is not None and self.text is not None:
            found.append((self.plan.text.attentions[number], self.text))
        return found

    def part_at(self, path: str) -> Replicated | None:
        """Return the part at the full `path` that is computed with all tokens; None for any other."""
        return next((part for part in self.plan.replicated if f"{self.path}.{part.path}" == path), None)

    def watches(self, path: str) -> bool:
        """Whether the functions of the module at the full `path` are intercepted."""
        return any(path == (f"{self.path}.{part}" if part else self.path) for part in self.plan.watched)
