"""Find a second run of tokens in the attention of a block, such as text that images attend to and that attends to them.

    1. perturb the rows of each argument    rows that are single queries and single keys of a call with the first run
    2. run the block on some rows of both   everything in it must be as with all of them

Its name, its length and its position are not given, as for the first run. Rows that are not found so, and those of a
block in which tokens meet outside attention, are computed by every rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.probe.block import BlockProbe
from patchpar.shard.transformer.probe.capture import CapturedBlock
from patchpar.shard.transformer.probe.check import MOST_COUNTS, middle_of, observed_alike
from patchpar.shard.transformer.probe.observe_block import observe_block
from patchpar.shard.transformer.probe.row_trace import Observed
from patchpar.shard.transformer.probe.token_rows import TokenArgument
from patchpar.shard.transformer.token_plan import BlockPlan, TextPlan, TokenRows
from patchpar.shard.transformer.token_ranges import TokenRanges
from patchpar.shard.transformer.token_runs import Runs, cut_runs, runs_of
from patchpar.shard.unsupported_model import attempted

Both = tuple[TokenRanges, TokenRanges]  # of the first run and the second


def with_text(plan: BlockPlan, probe: BlockProbe) -> BlockPlan:
    """Return the plan of a block with its second run of tokens, where there is one that can be split."""
    tokens = round(plan.ratio * probe.latent_size)
    found = sorted(_candidates(plan, probe, tokens), key=lambda each: (each.reaches_output, each.count), reverse=True)
    for anchor in found:
        with attempted():
            return _proved(plan, _plan_for(anchor, probe), probe.block, (tokens, anchor.count))
    return plan


def _candidates(plan: BlockPlan, probe: BlockProbe, tokens: int) -> Iterator[TokenArgument]:
    """Yield arguments with other rows than those of the `tokens` that are found, by which attention is joint."""
    joint = [number for number, call in enumerate(plan.attentions) if call.queries and call.keys]
    for name, x in probe.tensors.items() if joint else ():
        for dim in range(x.ndim) if x.is_floating_point() else ():
            run = _beside(plan.inputs.get(name), x, dim, tokens)
            anchor = probe.argument(name, dim, run) if run is not None and run[1] > 1 else None
            if anchor is not None and any(map(anchor.is_joined, joint)):
                yield anchor


def _beside(rows: TokenRows | None, x: Tensor, dim: int, tokens: int) -> tuple[int, int] | None:
    """Return (first, count) of the rows of x along `dim` that are not of the first run; None if on both sides of it."""
    size = x.shape[dim]
    if rows is None:
        return 0, size
    if rows.dim != dim:
        return None
    start = rows.start(size, tokens)
    if start == 0:
        return tokens, size - tokens
    return (0, start) if start + tokens == size else None


def _plan_for(anchor: TokenArgument, probe: BlockProbe) -> TextPlan:
    """Raises UnsupportedModel where the tokens of the anchor do not stay apart outside attention."""
    text = TextPlan(
        inputs=probe.inputs_beside(anchor),
        attentions=tuple(anchor.attention(number) for number in range(anchor.num_attentions)),
        outputs=anchor.outputs(),
    )
    if any(rows.amid for rows in (*text.inputs.values(), *text.outputs.values(), *_in_attention(text))):
        raise UnsupportedModel("there are other rows before its second run of tokens and after them")
    return text


def _in_attention(text: TextPlan) -> Iterator[TokenRows]:
    for call in text.attentions:
        yield from (rows for rows in (call.queries, call.keys) if rows is not None)


def _proved(plan: BlockPlan, text: TextPlan, block: CapturedBlock, sizes: tuple[int, int]) -> BlockPlan:
    """Return the plan with `text`, and with the arguments that count its tokens. Raises UnsupportedModel.

    `sizes`: the number of tokens of both runs.
    """
    whole, first = observe_block(block.module, block.arguments), middle_of(sizes[0])
    last = _other_middle(sizes[1], first.num_tokens - first.count)
    leaves, failures = block.arguments.leaves(), list[Exception]()
    numbers = [
        name
        for name, leaf in leaves.items()
        if type(leaf) is int and leaf == (sum(sizes) if name in plan.counts else sizes[1])
    ][:MOST_COUNTS]
    for counts in (each for size in range(len(numbers) + 1) for each in combinations(numbers, size)):
        found = replace(plan, text=replace(text, counts=counts))
        with attempted(failures):
            _try(found, block, whole, (first, last))
            return found
    raise UnsupportedModel(f"with some of its second run of tokens it fails: {failures[0]}")


def _other_middle(tokens: int, fewer: int) -> TokenRanges:
    """Return the ranges of a rank that has not `fewer` tokens less than all: masks then show which run they lack."""
    last = TokenRanges(group_rank=1, starts=(0, tokens // 2, tokens))
    return last if tokens - last.count != fewer else middle_of(tokens)


def _try(plan: BlockPlan, block: CapturedBlock, whole: Observed, both: Both) -> None:
    """Run the block on some tokens of either run and compare. Raises UnsupportedModel, or what the block raises."""
    wanted = {name: cut_runs(whole[name], runs) for name, runs in _observed_runs(plan, whole, both)}
    arguments = block.arguments.map(lambda name, leaf: _shared(plan, both, name, leaf))
    _refuse_masks(observed_alike(block, arguments, wanted), whole, both)


def _shared(plan: BlockPlan, both: Both, name: str, leaf: object) -> object:
    """Return an argument of the block for some tokens of either run."""
    assert plan.text is not None
    if isinstance(leaf, Tensor):
        return cut_runs(leaf, _runs(both, plan.inputs.get(name), plan.text.inputs.get(name)))
    for counts, ranges in zip((plan.counts, plan.text.counts), both, strict=True):
        if name in counts and isinstance(leaf, int):
            leaf += ranges.count - ranges.num_tokens
    return leaf


def _observed_runs(plan: BlockPlan, whole: Observed, both: Both) -> Iterator[tuple[str, Runs]]:
    """Yield what to compare and the runs in it; masks are not compared."""
    assert plan.text is not None
    for number, (first, second) in enumerate(zip(plan.attentions, plan.text.attentions, strict=True)):
        yield f"attention {number} query", _runs(both, first.queries, second.queries)
        for what in ("key", "value"):
            yield f"attention {number} {what}", _runs(both, first.keys, second.keys)
    for name in whole:
        if name.startswith("output"):
            number = int(name.split()[1])
            yield name, _runs(both, plan.outputs.get(number), plan.text.outputs.get(number))


def _runs(both: Both, *rows: TokenRows | None) -> Runs:
    return runs_of(zip(rows, both, strict=True))


def _refuse_masks(own: Observed, whole: Observed, both: Both) -> None:
    """Raise UnsupportedModel for a mask of queries and keys that a block makes, or that lacks text alone."""
    lacking = [ranges.num_tokens - ranges.count for ranges in both]
    for name, mask in own.items():
        if not name.endswith("mask"):
            continue
        rows = whole[name].shape[-2] - mask.shape[-2] if mask.ndim > 1 else 0
        columns = whole[name].shape[-1] - mask.shape[-1]
        if rows or columns not in (0, lacking[0], sum(lacking)) or (columns and mask.ndim > 1 and mask.shape[-2] > 1):
            raise UnsupportedModel("its masks are made from the tokens that are here")
