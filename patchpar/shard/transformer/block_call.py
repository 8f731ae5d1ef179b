"""The state of a call of a block whose tokens are split."""

from collections.abc import Mapping

from patchpar.shard.transformer.block_arguments import ArgumentRule
from patchpar.shard.transformer.split_tokens import CallRuns
from patchpar.shard.transformer.token_plan import BlockPlan, Replicated, TokenRows
from patchpar.shard.transformer.token_ranges import TokenRanges
from patchpar.shard.transformer.token_runs import Runs, runs_of


class BlockRuns:
    """Where tokens of `ranges`, and of `text` if that is split too, are in a block that is called by `rule`.

    `inputs` and `outputs`: the runs in each argument and output that has some, by number. `attentions`: where each run
    is in each attention call. `text_name`: of the ranges of the text.
    """

    def __init__(self, plan: BlockPlan, rule: ArgumentRule, ranges: TokenRanges, text: TokenRanges | None) -> None:
        self.plan, self.rule, self.ranges, self.text = plan, rule, ranges, text
        self.text_name = f"{plan.name}, text"
        outputs = {} if plan.text is None else plan.text.outputs
        self.inputs = self._runs(dict(rule.inputs), dict(rule.text))
        self.outputs = {number: runs for number, runs in self._runs(plan.outputs, outputs).items() if runs}
        of_text = () if plan.text is None or text is None else plan.text.attentions
        self.attentions = tuple(
            CallRuns([(tokens, ranges), *((each, text) for each in of_text[number : number + 1] if text is not None)])
            for number, tokens in enumerate(plan.attentions)
        )

    def _runs(self, first: Mapping[int, TokenRows], text: Mapping[int, TokenRows]) -> dict[int, Runs]:
        return {
            number: runs_of(((first.get(number), self.ranges), (text.get(number), self.text)))
            for number in first.keys() | text.keys()
        }


class KnownRuns:
    """The runs of blocks in calls so far: the same in every step of an image."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], BlockRuns] = {}  # by the ids of what each of them keeps
        self._same: dict[Runs, Runs] = {}

    def of(self, plan: BlockPlan, rule: ArgumentRule, ranges: TokenRanges, text: TokenRanges | None) -> BlockRuns:
        """Return the runs of a block that is called by `rule`. Equal runs of several blocks are one object."""
        key = (id(rule), id(ranges), id(text))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = BlockRuns(plan, rule, ranges, text)
            for runs in (found.inputs, found.outputs):
                runs |= {number: self._same.setdefault(each, each) for number, each in runs.items()}
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._found.clear()
        self._same.clear()


class BlockCall:
    """A running call of a block on this rank's tokens, `ranges`. `text`: of its text, if that is split too."""

    def __init__(self, path: str, runs: BlockRuns) -> None:
        self.path, self.plan, self.runs, self.ranges, self.text = path, runs.plan, runs, runs.ranges, runs.text
        self.attentions = self.sums = self.convolutions = 0
        self.part: str | None = None  # the running part that every rank computes with all tokens

    def part_at(self, path: str) -> Replicated | None:
        """Return the part at the full `path` that is computed with all tokens; None for any other."""
        return next((part for part in self.plan.replicated if f"{self.path}.{part.path}" == path), None)

    def watches(self, path: str) -> bool:
        """Whether the functions of the module at the full `path` are intercepted."""
        return any(path == (f"{self.path}.{part}" if part else self.path) for part in self.plan.watched)
